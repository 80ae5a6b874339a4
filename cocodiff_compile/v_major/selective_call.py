"""A compiled graph whose exchanges carry less in some steps: one kind of code per kind of step.

Which kind runs is a function of the step and of numbers that the ranks share; before the first call
of a step they compare it, so that a rank that is elsewhere is an error on all and not a hang.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cocodiff_compile.agreement.world import ranks_are_real
from cocodiff_compile.compat import find_group
from cocodiff_compile.errors import PeerError
from cocodiff_compile.say_once import say_once
from cocodiff_compile.v_major.denoising import (
    Choice,
    Denoising,
    Memory,
    StepRecord,
    bytes_of,
    current_denoising,
)
from cocodiff_compile.v_major.policy import Policy, StepFacts
from cocodiff_compile.v_major.travel import Travel

log = logging.getLogger(__name__)

_OUTSIDE = (
    "v_major is on, but the model was called outside of `with cocodiff_compile.denoising(...)`: "
    "all travels in full"
)


@dataclass(frozen=True)
class _Place:
    """Where a rank is: all ranks of a group must be in the same, and may have other drifts."""

    step: int
    num_steps: int
    last: int
    is_out_of_order: bool
    memories: int
    """Calls of which something is remembered."""
    drift: float | None = None

    @property
    def without_drift(self) -> _Place:
        return replace(self, drift=None)

    def to_numbers(self) -> list[int]:
        """Whole ones, which every device has."""
        (drift,) = struct.unpack("<q", struct.pack("<d", self.drift or 0.0))
        flags = int(self.is_out_of_order), int(self.drift is not None)
        return [self.step, self.num_steps, self.last, self.memories, *flags, drift]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> _Place:
        step, num_steps, last, memories, is_out_of_order, has_drift, bits = numbers
        (drift,) = struct.unpack("<d", struct.pack("<q", bits)) if has_drift else (None,)
        return cls(step, num_steps, last, bool(is_out_of_order), memories, drift)

    def __str__(self) -> str:
        if self.step < 0:
            return "no step (outside of denoising)"
        order = ", out of order" if self.is_out_of_order else ""
        return (
            f"step {self.step} of {self.num_steps or 'an unknown number'}{order}, with "
            f"{self.memories} calls remembered and the last step of kind {self.last:08x}"
        )


_OUTSIDE_PLACE = _Place(-1, 0, 0, False, 0)


@dataclass(frozen=True)
class Variant:
    """Code for one kind of step, and the shapes of what it remembers, which follow its inputs."""

    run: Callable[[list[Any]], Any]
    memories: tuple[Tensor, ...]
    """Fake tensors; with a drift, that is the last one."""
    sent_bytes: int
    """That a rank sends to others in one call."""


@dataclass(eq=False)
class SelectiveCall:
    """Called like the compiled graph it stands for."""

    compile_variant: Callable[[Travel | None], Variant]
    """None: as if there were no steps."""
    policy: Policy
    group: str
    weights: Sequence[int]
    """Places of the inputs that tell blocks of the model apart, where all run the same graph: by
    identity, which stays where weights are moved."""
    full_bytes: int
    """That a rank sends to others in one exact call."""
    budget_bytes: float | None = None
    _variants: dict[Travel | None, Variant] = field(default_factory=dict)
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> Any:
        run = current_denoising(args)
        if run is None:
            say_once(log, logging.WARNING, _OUTSIDE)
            self._agreed_drift(_OUTSIDE_PLACE, args)
            return self.variant(None).run(args)
        travel = self._travel(run, args)
        key = run.key_of(self, tuple(id(args[place]) for place in self.weights))
        memory = run.memories.get(key)
        if memory is None:
            travel = self.policy.first
            memory = self._new_memory(run)
            if memory is None:
                self._note(run, self.full_bytes)
                return self.variant(None).run(args)
            run.memories[key] = memory
        memory.turn, memory.is_coded = run.turn, not travel.stands_alone
        self._note(run, self.variant(travel).sent_bytes)
        given = [*args, *memory.tensors]
        args.clear()
        try:
            return self.variant(travel).run(given)
        except BaseException:
            # Half written: nothing may lean on it. A rank that fails alone is told apart by it.
            run.memories.pop(key, None)
            raise

    def _note(self, run: Denoising, sent_bytes: int) -> None:
        record = run.choices[self].record
        record.calls += 1
        record.sent_bytes += sent_bytes
        record.full_bytes += self.full_bytes
        record.memory_bytes = run.memory_bytes

    def add_variant(self, travel: Travel | None, variant: Variant) -> None:
        self._variants[travel] = variant

    def variant(self, travel: Travel | None) -> Variant:
        if travel not in self._variants:
            self._variants[travel] = self.compile_variant(travel)
        return self._variants[travel]

    def _travel(self, run: Denoising, args: Sequence[Any]) -> Travel:
        """Chosen at the first call of a step, for all of its calls."""
        choice = run.choices.get(self)
        if choice is not None and choice.turn == run.turn:
            return choice.travel
        last = choice.travel if choice else self.policy.first
        place = _Place(
            run.current_step,
            run.num_steps or 0,
            zlib.crc32(str(last).encode()),
            run.is_out_of_order,
            len(self._own_memories(run)),
            self._own_drift(run, choice),
        )
        drift = self._agreed_drift(place, args)
        facts = StepFacts(run.current_step, run.num_steps, drift, last)
        is_alone = run.is_out_of_order or choice is None
        travel = self.policy.first if is_alone else self.policy.choose(facts)
        record = StepRecord(run.current_step, str(travel))
        run.history.append(record)
        run.choices[self] = Choice(run.turn, travel, record)
        return travel

    def _own_memories(self, run: Denoising) -> list[Memory]:
        return [item for key, item in run.memories.items() if key[0] is self]  # type: ignore[index]

    def _own_drift(self, run: Denoising, last: Choice | None) -> float | None:
        """Of all calls of the last step, on this rank."""
        drifts = [
            item.drift
            for item in self._own_memories(run)
            if last is not None and item.turn == last.turn and item.is_coded
        ]
        found = [drift for drift in drifts if drift is not None]
        return float(torch.stack(found).mean()) if found else None

    def _agreed_drift(self, mine: _Place, args: Sequence[Any]) -> float | None:
        """The mean over ranks, which must all be in the same place: from here on all choose alike.
        One collective, so that a rank that is elsewhere meets the others in it.
        """
        if not ranks_are_real():
            return mine.drift
        group = find_group(self.group)
        ranks = dist.get_process_group_ranks(group)
        # Where the arguments are: not every backend takes tensors of the host.
        device = next(item.device for item in args if isinstance(item, Tensor))
        sent = torch.tensor(mine.to_numbers(), device=device)
        received = [torch.empty_like(sent) for _ in ranks]
        dist.all_gather(received, sent, group=group)
        places = [_Place.from_numbers(item.tolist()) for item in received]
        for rank, place in zip(ranks, places, strict=True):
            if place.without_drift != places[0].without_drift:
                raise PeerError(
                    f"ranks disagree about the denoising step: rank {rank} is at {place}, the "
                    f"first rank of its group at {places[0]}; call the model the same number of "
                    "times on every rank, all of them inside or all outside of "
                    "cocodiff_compile.denoising"
                )
        drifts = [place.drift for place in places if place.drift is not None]
        return sum(drifts) / len(drifts) if drifts else None

    def _new_memory(self, run: Denoising) -> Memory | None:
        """Allocated here, at the first call; None if there is no room left."""
        fakes = self.variant(self.policy.first).memories
        needed = bytes_of(fakes)
        used = run.memory_bytes
        if self.budget_bytes is not None and used + needed > self.budget_bytes:
            say_once(
                log,
                logging.WARNING,
                f"v_major: {needed / 2**20:.1f} MiB more would exceed the memory budget of "
                f"{self.budget_bytes / 2**20:.1f} MiB, {used / 2**20:.1f} are in use: what has no "
                "room travels in full",
            )
            return None
        with torch.inference_mode(False):  # a later call may be in another mode
            tensors = [
                torch.zeros(item.shape, dtype=item.dtype, device=item.device) for item in fakes
            ]
        has_drift = self.policy.measures_drift and bool(tensors)
        return Memory(tensors, tensors[-1] if has_drift else None)
