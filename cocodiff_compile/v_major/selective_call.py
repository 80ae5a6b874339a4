"""A compiled graph whose exchanges carry less in some steps: one kind of code per kind of step.

Which kind runs is a function of the step and of numbers that the ranks share; before the first call
of a step they compare it, so that a rank that is elsewhere is an error on all and not a hang.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    current_denoising,
)
from cocodiff_compile.v_major.policy import Policy, StepFacts
from cocodiff_compile.v_major.travel import IN_FULL, Travel

log = logging.getLogger(__name__)

_OUTSIDE = (
    "v_major is on, but the model was called outside of `with cocodiff_compile.denoising(...)`: "
    "all travels in full"
)


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
    """Places of the inputs that tell blocks of the model apart, where all run the same graph."""
    budget_bytes: float | None = None
    _variants: dict[Travel | None, Variant] = field(default_factory=dict)
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> Any:
        run = current_denoising(args)
        if run is None:
            say_once(log, logging.WARNING, _OUTSIDE)
            self._agree(-1, None)
            return self.variant(None).run(args)
        travel = self._travel(run)
        key = run.key_of(self, tuple(args[place].data_ptr() for place in self.weights))
        memory = run.memories.get(key)
        if memory is None:
            travel = IN_FULL
            memory = self._new_memory(run)
            if memory is None:
                self._note(run, self.variant(IN_FULL).sent_bytes)
                return self.variant(None).run(args)
            run.memories[key] = memory
        memory.turn, memory.is_coded = run.turn, not travel.is_full
        self._note(run, self.variant(travel).sent_bytes)
        given = [*args, *memory.tensors]
        args.clear()
        return self.variant(travel).run(given)

    def _note(self, run: Denoising, sent_bytes: int) -> None:
        record = run.choices[self].record
        record.calls += 1
        record.sent_bytes += sent_bytes
        record.full_bytes += self.variant(IN_FULL).sent_bytes
        record.memory_bytes = sum(_size_bytes(item) for item in run.memories.values())

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
        last = choice.travel if choice else IN_FULL
        drift = self._drift(run, choice.turn) if choice else None
        facts = StepFacts(run.current_step, run.num_steps, drift, last)
        travel = IN_FULL if run.is_out_of_order or choice is None else self.policy.choose(facts)
        self._agree(run.current_step, travel)
        record = StepRecord(run.current_step, str(travel))
        run.history.append(record)
        run.choices[self] = Choice(run.turn, travel, record)
        return travel

    def _drift(self, run: Denoising, turn: int) -> float | None:
        """Of all calls of one step, the mean over ranks."""
        own = [item for key, item in run.memories.items() if _is_of(key, self)]
        last = [item for item in own if item.turn == turn and item.is_coded]
        drifts = [item.drift for item in last if item.drift is not None]
        if not drifts:
            return None
        mean = torch.stack(drifts).mean().reshape(1)
        if ranks_are_real():
            dist.all_reduce(mean, group=find_group(self.group))
            mean /= len(dist.get_process_group_ranks(find_group(self.group)))
        return float(mean)

    def _agree(self, step: int, travel: Travel | None) -> None:
        if not ranks_are_real():
            return
        group = find_group(self.group)
        mine = torch.tensor([step, zlib.crc32(str(travel).encode())])
        everyone = [torch.empty_like(mine) for _ in dist.get_process_group_ranks(group)]
        dist.all_gather(everyone, mine, group=group)
        for rank, theirs in zip(dist.get_process_group_ranks(group), everyone, strict=True):
            if not torch.equal(theirs, everyone[0]):
                raise PeerError(
                    f"ranks disagree about the denoising step: rank {rank} is at "
                    f"{_named(theirs)}, the first rank of its group at {_named(everyone[0])}; call "
                    "the model the same number of times on every rank, all of them inside or all "
                    "outside of cocodiff_compile.denoising"
                )

    def _new_memory(self, run: Denoising) -> Memory | None:
        """Allocated here, at the first call; None if there is no room left."""
        fakes = self.variant(IN_FULL).memories
        needed = sum(item.numel() * item.element_size() for item in fakes)
        used = sum(_size_bytes(item) for item in run.memories.values())
        if self.budget_bytes is not None and used + needed > self.budget_bytes:
            say_once(
                log,
                logging.WARNING,
                f"v_major: {needed / 2**20:.1f} MiB more would exceed the memory budget of "
                f"{self.budget_bytes / 2**20:.1f} MiB, {used / 2**20:.1f} are in use: what has no "
                "room travels in full",
            )
            return None
        tensors = [torch.zeros(item.shape, dtype=item.dtype, device=item.device) for item in fakes]
        has_drift = self.policy.measures_drift and bool(tensors)
        return Memory(tensors, tensors[-1] if has_drift else None)


def _is_of(key: Any, call: SelectiveCall) -> bool:
    return key[0] is call


def _size_bytes(memory: Memory) -> int:
    return sum(item.numel() * item.element_size() for item in memory.tensors)


def _named(facts: Tensor) -> str:
    step = int(facts[0])
    return "no step (outside of denoising)" if step < 0 else f"step {step}"
