"""A compiled graph whose exchanges carry less in some steps: one kind of code per kind of step.

Which kind runs is a function of the step and of numbers that the ranks share; before the first call
of a step they compare it, so that a rank that is elsewhere is an error on all and not a hang.
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cocodiff_compile.compat import find_group
from cocodiff_compile.errors import PeerError
from cocodiff_compile.ranks.agreement.world import ranks_are_real
from cocodiff_compile.say_once import say_once
from cocodiff_compile.v_major.denoising import (
    Choice,
    Denoising,
    Memory,
    StepRecord,
    Weights,
    bytes_of,
    current_denoising,
    is_denoising,
)
from cocodiff_compile.v_major.policy import Policy, StepFacts
from cocodiff_compile.v_major.travel import Travel

log = logging.getLogger(__name__)

_OUTSIDE = (
    "v_major is on, but the model was called outside of `with cocodiff_compile.denoising(...)`: "
    "all travels in full"
)
_NOT_OWNED = (
    "v_major is on, but the model was called in a `with cocodiff_compile.denoising(pipe)` whose "
    "pipeline has none of its weights: all travels in full; enter the block once the pipeline has "
    "the weights it runs with, or use denoising(num_steps=...) and call .step() after each step"
)


_LOST = -2
"""In place of a step: ranks of another group are not in the same."""


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
    worst: float = 0.0

    @property
    def without_drift(self) -> _Place:
        return replace(self, drift=None, worst=0.0)

    def to_numbers(self) -> list[int]:
        """Whole ones, which every device has."""
        lost = struct.unpack("<qq", struct.pack("<dd", self.drift or 0.0, self.worst))
        flags = int(self.is_out_of_order), int(self.drift is not None)
        return [self.step, self.num_steps, self.last, self.memories, *flags, *lost]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> _Place:
        step, num_steps, last, memories, is_out_of_order, has_drift, *lost = numbers
        drift, worst = struct.unpack("<dd", struct.pack("<qq", *lost))
        place = cls(step, num_steps, last, bool(is_out_of_order), memories)
        return replace(place, drift=drift, worst=worst) if has_drift else place

    def __str__(self) -> str:
        if self.step == _LOST:
            return "a step that another of its groups disagrees about"
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
    """Code for one kind of step, and the shapes of what it remembers, which follow its inputs; the
    drift, if it measures one, comes last.
    """

    run: Callable[[list[Any]], Any]
    memories: tuple[Tensor, ...]
    """Fake tensors, the drift not among them."""
    sent_bytes: int
    """That a rank sends to others in one call."""


@dataclass(eq=False)
class SelectiveCall:
    """Called like the compiled graph it stands for."""

    compile_variant: Callable[[Travel | None], Variant]
    """None: as if there were no steps."""
    policy: Policy
    groups: Sequence[str]
    """All that the graph communicates over, in an order that its ranks share."""
    device: torch.device
    """Of what is exchanged."""
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
            say_once(log, logging.WARNING, _NOT_OWNED if is_denoising() else _OUTSIDE)
            self._agree(_OUTSIDE_PLACE)
            return self.variant(None).run(args)
        travel = self._travel(run)
        weights = [args[place] for place in self.weights]
        key = run.key_of(self, tuple(map(id, weights)))
        memory = run.memories.get(key)
        if memory is None or not memory.weights.exist:
            travel = self.policy.first
            memory = self._new_memory(run, weights) if key is not None else None
            if memory is None:
                self._note(run, None)
                return self.variant(None).run(args)
            run.memories[key] = memory
        variant = self.variant(travel)
        memory.turn, memory.carried = run.turn, travel
        self._note(run, travel)
        given = [*args, *memory.tensors]
        if memory.drift is not None:
            given.append(memory.drift)
        args.clear()
        try:
            return variant.run(given)
        except BaseException:
            # Half written: nothing may lean on it. A rank that fails alone is told apart by it.
            run.memories.pop(key, None)
            raise

    def _note(self, run: Denoising, travel: Travel | None) -> None:
        record = run.choices[self].record
        record.kinds[str(travel or "exact")] += 1
        record.sent_bytes += self.full_bytes if travel is None else self.variant(travel).sent_bytes
        record.full_bytes += self.full_bytes
        record.memory_bytes = run.memory_bytes

    def add_variant(self, travel: Travel | None, variant: Variant) -> None:
        self._variants[travel] = variant

    def variant(self, travel: Travel | None) -> Variant:
        if travel not in self._variants:
            self._variants[travel] = self.compile_variant(travel)
        return self._variants[travel]

    def _travel(self, run: Denoising) -> Travel:
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
            *self._own_drift(run, choice),
        )
        drift, worst = self._agree(place)
        facts = StepFacts(run.current_step, run.num_steps, drift, last, worst)
        is_alone = run.is_out_of_order or choice is None
        travel = self.policy.first if is_alone else self.policy.choose(facts)
        record = StepRecord(run.current_step)
        run.history.append(record)
        run.choices[self] = Choice(run.turn, travel, record)
        return travel

    def _own_memories(self, run: Denoising) -> list[Memory]:
        return [item for key, item in run.memories.items() if key[0] is self]  # type: ignore[index]

    def _own_drift(self, run: Denoising, last: Choice | None) -> tuple[float | None, float]:
        """The mean of all calls of the last step, on this rank, and the worst. Of those that
        carried what the step did: a call that is new in it does not.
        """
        drifts = [
            item.drift
            for item in self._own_memories(run)
            if last is not None and item.turn == last.turn and item.carried == last.travel
        ]
        found = [drift for drift in drifts if drift is not None]
        if not found or last is None or last.travel.is_full:
            return None, 0.0
        means, worst = torch.stack(found).unbind(1)
        return float(means.mean()), float(worst.amax())

    def _agree(self, mine: _Place) -> tuple[float | None, float]:
        """The mean drift of all ranks and the worst, which must be in the same place: from here on
        all choose alike. Where groups are the axes of a grid, that is one mean over the whole grid.
        One collective per group, so that a rank that is elsewhere meets the others in it; a rank
        that knows of one goes on, to tell its other groups.
        """
        error = ""
        for name in self.groups if ranks_are_real() else ():
            places = self._places(name, mine)
            error = error or _disagreement(places)
            drifts = [place.drift for place in places.values() if place.drift is not None]
            worst = _largest(place.worst for place in places.values())
            mine = replace(mine, drift=sum(drifts) / len(drifts) if drifts else None, worst=worst)
            if error:
                mine = replace(mine, step=_LOST)
        if error:
            raise PeerError(error)
        return mine.drift, mine.worst

    def _places(self, name: str, mine: _Place) -> dict[int, _Place]:
        """Of the ranks of a group."""
        group = find_group(name)
        ranks = dist.get_process_group_ranks(group)
        sent = torch.tensor(mine.to_numbers(), device=self.device)
        received = [torch.empty_like(sent) for _ in ranks]
        dist.all_gather(received, sent, group=group)
        places = (_Place.from_numbers(item.tolist()) for item in received)
        return dict(zip(ranks, places, strict=True))

    def _new_memory(self, run: Denoising, weights: Sequence[Tensor]) -> Memory | None:
        """Allocated here, at the first call; None if there is no room left."""
        fakes = self.variant(self.policy.first).memories
        needed = bytes_of(fakes)
        used = run.memory_bytes
        if self.budget_bytes is not None and used + needed > self.budget_bytes:
            say_once(
                log,
                logging.WARNING,
                f"v_major: {needed / 2**20:.2f} MiB more would exceed the memory budget of "
                f"{self.budget_bytes / 2**20:.2f} MiB, {used / 2**20:.2f} are in use: what has no "
                "room travels in full",
            )
            return None
        with torch.inference_mode(False):  # a later call may be in another mode
            tensors = [
                torch.zeros(item.shape, dtype=item.dtype, device=item.device) for item in fakes
            ]
            has_drift = self.policy.measures_drift and bool(tensors)
            drift = torch.zeros(2, dtype=torch.float32, device=self.device) if has_drift else None
        return Memory(tensors, drift, Weights(weights))


def _largest(numbers: Iterable[float]) -> float:
    """NaN if any is: what is unknown on one rank is unknown to all."""
    found = list(numbers)
    return next((number for number in found if math.isnan(number)), max(found))


def _disagreement(places: Mapping[int, _Place]) -> str:
    """Of the ranks of a group, by rank."""
    first = next(iter(places.values()))
    for rank, place in places.items():
        if place.without_drift != first.without_drift:
            return (
                f"ranks disagree about the denoising step: rank {rank} is at {place}, the first "
                f"rank of its group at {first}; call the model the same number of times on every "
                "rank, all of them inside or all outside of cocodiff_compile.denoising"
            )
    return ""
