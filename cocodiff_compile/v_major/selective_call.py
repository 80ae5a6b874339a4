# SPDX-License-Identifier: Apache-2.0
"""Calls a compiled graph that has one variant of generated code per payload of a denoising step.

The variant is a function of the step and of numbers that the ranks share. Ranks compare their
states before the first call of each step, so that a rank that is at another step raises an error on
all ranks instead of a hang.
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections import deque
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
    CallCache,
    Choice,
    Denoising,
    StepRecord,
    Weights,
    bytes_of,
    current_denoising,
    is_denoising,
)
from cocodiff_compile.v_major.payload import EXACT, Payload
from cocodiff_compile.v_major.policy import Policy, StepFacts

log = logging.getLogger(__name__)

_OUTSIDE = (
    "v_major is on, but the model was called outside of `with cocodiff_compile.denoising(...)`: "
    "everything is sent uncompressed; call it inside of the block"
)
_NOT_OWNED = (
    "v_major is on, but the model was called in a `with cocodiff_compile.denoising(pipe)` whose "
    "pipeline has none of its weights: everything is sent uncompressed; enter the block once the "
    "pipeline has the weights it runs with, or use denoising(num_steps=...) and call .step() after "
    "each step"
)


_RECORDED_STEPS = 1000
"""How many of the last steps are kept for a page."""
_DISAGREEING_STEP = -2
"""Stands in place of a step if ranks of another group disagree about theirs."""


@dataclass(frozen=True)
class _StepState:
    """Describes the step of a rank. It is the same on all ranks of a group but for drifts."""

    step: int
    num_steps: int
    last: int
    is_out_of_order: bool
    caches: int
    """The number of calls that have a cache."""
    drift: float | None = None
    worst: float = 0.0

    @property
    def without_drift(self) -> _StepState:
        return replace(self, drift=None, worst=0.0)

    def to_numbers(self) -> list[int]:
        """Returns the state as integers, which every device can exchange."""
        lost = struct.unpack("<qq", struct.pack("<dd", self.drift or 0.0, self.worst))
        flags = int(self.is_out_of_order), int(self.drift is not None)
        return [self.step, self.num_steps, self.last, self.caches, *flags, *lost]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> _StepState:
        step, num_steps, last, caches, is_out_of_order, has_drift, *lost = numbers
        drift, worst = struct.unpack("<dd", struct.pack("<qq", *lost))
        state = cls(step, num_steps, last, bool(is_out_of_order), caches)
        return replace(state, drift=drift, worst=worst) if has_drift else state

    def __str__(self) -> str:
        if self.step == _DISAGREEING_STEP:
            return "a step that another of its groups disagrees about"
        if self.step < 0:
            return "no step (outside of denoising)"
        order = ", out of order" if self.is_out_of_order else ""
        return (
            f"step {self.step} of {self.num_steps or 'an unknown number'}{order}, with "
            f"{self.caches} cached calls and the last step of kind {self.last:08x}"
        )


_OUTSIDE_STATE = _StepState(-1, 0, 0, False, 0)


@dataclass(frozen=True)
class Variant:
    """Holds the code for one payload, and the shapes of its caches. Caches follow the inputs of the
    graph; the drift, if it is measured, comes last.
    """

    run: Callable[[list[Any]], Any]
    caches: tuple[Tensor, ...]
    """Fake tensors, without the drift."""
    sent_bytes: int
    """The bytes that a rank sends to others in one call."""
    sent_by_site: tuple[int, ...] = ()
    """The same for each attention."""
    loss_sites: tuple[int, ...] = ()
    """The attention that each loss is of, in the order in which they follow the drift."""


@dataclass(eq=False)
class SelectiveCall:
    """Calls the variant that the current step needs, in place of the compiled graph."""

    compile_variant: Callable[[Payload | None], Variant]
    """Compiles the variant of a payload; None stands for a call outside of denoising."""
    policy: Policy
    groups: Sequence[str]
    """All groups that the graph communicates over, in an order that its ranks share."""
    device: torch.device
    """The device of the exchanged tensors."""
    weights: Sequence[int]
    """The indices of the inputs that distinguish blocks of a model that share one graph. They are
    compared by identity, which does not change when weights are moved.
    """
    full_bytes: int
    """The bytes that a rank sends to others in one uncompressed call."""
    budget_bytes: float | None = None
    num_losses: int = 0
    """How many losses follow the mean and the worst in a drift."""
    records: Callable[[Sequence[StepRecord], Mapping[str, Variant]], None] | None = None
    """Is called when a block ends, with all steps of this graph and its variants by their kind."""
    _steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_RECORDED_STEPS))
    _variants: dict[Payload | None, Variant] = field(default_factory=dict)
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> Any:
        run = current_denoising(args)
        if run is None:
            say_once(log, logging.WARNING, _NOT_OWNED if is_denoising() else _OUTSIDE)
            self._agree(_OUTSIDE_STATE)
            return self.variant(None).run(args)
        payload = self._payload(run)
        weights = [args[index] for index in self.weights]
        key = run.key_of(self, tuple(map(id, weights)))
        cache = run.caches.get(key)
        if cache is None or not cache.weights.exist:
            payload = self.policy.first
            cache = self._new_cache(run, weights) if key is not None else None
            if cache is None:
                self._note(run, None)
                return self.variant(None).run(args)
            run.caches[key] = cache
        variant = self.variant(payload)
        cache.steps_taken, cache.last_payload = run.steps_taken, payload
        self._note(run, payload)
        given = [*args, *cache.tensors]
        if cache.drift is not None:
            given.append(cache.drift)
        args.clear()
        try:
            return variant.run(given)
        except BaseException:
            # The cache is half written and must not be used. If only this rank failed, the number
            # of caches, which ranks compare, tells it from the others.
            run.caches.pop(key, None)
            raise

    def _note(self, run: Denoising, payload: Payload | None) -> None:
        record = run.choices[self].record
        record.kinds[str(payload or EXACT)] += 1
        record.sent_bytes += (
            self.full_bytes if payload is None else self.variant(payload).sent_bytes
        )
        record.full_bytes += self.full_bytes
        record.cache_bytes = run.cache_bytes

    def add_variant(self, payload: Payload | None, variant: Variant) -> None:
        self._variants[payload] = variant

    def variant(self, payload: Payload | None) -> Variant:
        if payload not in self._variants:
            self._variants[payload] = self.compile_variant(payload)
        return self._variants[payload]

    def _payload(self, run: Denoising) -> Payload:
        """Returns the payload of the step, which is chosen at its first call."""
        choice = run.choices.get(self)
        if choice is not None and choice.steps_taken == run.steps_taken:
            return choice.payload
        last = choice.payload if choice else self.policy.first
        if choice is not None and self.records is not None:
            choice.record.losses = self._losses(run, choice)
        state = _StepState(
            run.current_step,
            run.num_steps or 0,
            zlib.crc32(str(last).encode()),
            run.is_out_of_order,
            len(self._own_caches(run)),
            *self._own_drift(run, choice),
        )
        drift, worst = self._agree(state)
        facts = StepFacts(run.current_step, run.num_steps, drift, last, worst)
        is_keyframe = run.is_out_of_order or choice is None
        payload = self.policy.first if is_keyframe else self.policy.choose(facts)
        record = StepRecord(run.current_step)
        run.history.append(record)
        if self.records is not None:
            self._steps.append(record)
            run.at_end[self] = self._tell_records
        run.choices[self] = Choice(run.steps_taken, payload, record)
        return payload

    def _own_caches(self, run: Denoising) -> list[CallCache]:
        return [item for key, item in run.caches.items() if key[0] is self]  # type: ignore[index]

    def _own_drift(self, run: Denoising, last: Choice | None) -> tuple[float | None, float]:
        """Returns the mean and the worst drift of the last step's calls on this rank. Calls with
        another payload than the step's, which are new in it, do not count.
        """
        measured = self._measured(run, last)
        if not measured:
            return None, 0.0
        means, worst = torch.stack([item[:2] for item in measured]).unbind(1)
        return float(means.mean()), float(worst.amax())

    def _measured(self, run: Denoising, last: Choice | None) -> list[Tensor]:
        """Returns the drifts of the last step's calls on this rank, as `_own_drift` takes them."""
        if last is None or last.payload.is_uncompressed:
            return []
        return [
            item.drift
            for item in self._own_caches(run)
            if item.steps_taken == last.steps_taken
            and item.last_payload == last.payload
            and item.drift is not None
        ]

    def _losses(self, run: Denoising, last: Choice) -> tuple[float, ...]:
        """Returns the mean loss of each attention in the last step; nothing if unmeasured."""
        variant, measured = self._variants.get(last.payload), self._measured(run, last)
        if not measured or variant is None or not variant.loss_sites:
            return ()
        means = torch.stack([item[2:] for item in measured]).mean(0).tolist()
        by_site: list[list[float]] = [[] for _ in variant.sent_by_site]
        for site, mean in zip(variant.loss_sites, means, strict=False):
            by_site[site].append(mean)
        return tuple(sum(own) / len(own) if own else 0.0 for own in by_site)

    def _tell_records(self) -> None:
        if self.records is not None:
            kinds = {str(key or EXACT): variant for key, variant in self._variants.items()}
            self.records(tuple(self._steps), kinds)

    def _agree(self, mine: _StepState) -> tuple[float | None, float]:
        """Returns the mean and the worst drift of all ranks. Raises PeerError unless all ranks have
        the same state; from here on all ranks make the same choice.

        Where groups are the axes of a grid, the mean is over the whole grid. There is one
        collective per group, so that a rank at another step meets the others in it; a rank that has
        seen a disagreement goes on, to tell its other groups.
        """
        error = ""
        for name in self.groups if ranks_are_real() else ():
            states = self._states(name, mine)
            error = error or _disagreement(states)
            drifts = [state.drift for state in states.values() if state.drift is not None]
            worst = _largest(state.worst for state in states.values())
            mine = replace(mine, drift=sum(drifts) / len(drifts) if drifts else None, worst=worst)
            if error:
                mine = replace(mine, step=_DISAGREEING_STEP)
        if error:
            raise PeerError(error)
        return mine.drift, mine.worst

    def _states(self, name: str, mine: _StepState) -> dict[int, _StepState]:
        """Returns the states of the ranks of a group."""
        group = find_group(name)
        ranks = dist.get_process_group_ranks(group)
        sent = torch.tensor(mine.to_numbers(), device=self.device)
        received = [torch.empty_like(sent) for _ in ranks]
        dist.all_gather(received, sent, group=group)
        states = (_StepState.from_numbers(item.tolist()) for item in received)
        return dict(zip(ranks, states, strict=True))

    def _new_cache(self, run: Denoising, weights: Sequence[Tensor]) -> CallCache | None:
        """Allocates the cache of a call; returns None if it would exceed the budget."""
        fakes = self.variant(self.policy.first).caches
        needed = bytes_of(fakes)
        used = run.cache_bytes
        if self.budget_bytes is not None and used + needed > self.budget_bytes:
            say_once(
                log,
                logging.WARNING,
                f"v_major: caches of {needed / 2**20:.2f} MiB more would exceed the memory budget "
                f"of {self.budget_bytes / 2**20:.2f} MiB, of which {used / 2**20:.2f} are in use: "
                "calls without a cache are sent uncompressed; raise 'memory_budget_mib'",
            )
            return None
        with torch.inference_mode(False):  # a later call may be in another mode
            tensors = [
                torch.zeros(item.shape, dtype=item.dtype, device=item.device) for item in fakes
            ]
            has_drift = self.policy.measures_drift and bool(tensors)
            size = 2 + self.num_losses
            drift = (
                torch.zeros(size, dtype=torch.float32, device=self.device) if has_drift else None
            )
        return CallCache(tensors, drift, Weights(weights))


def _largest(numbers: Iterable[float]) -> float:
    """Returns the largest number, or NaN if any is: what one rank does not know, none does."""
    values = list(numbers)
    return next((value for value in values if math.isnan(value)), max(values))


def _disagreement(states: Mapping[int, _StepState]) -> str:
    """Returns a message if the states of the ranks of a group differ, else an empty string."""
    first = next(iter(states.values()))
    for rank, state in states.items():
        if state.without_drift != first.without_drift:
            return (
                f"ranks disagree about the denoising step: rank {rank} is at {state}, the first "
                f"rank of its group at {first}; call the model the same number of times on every "
                "rank, all of them inside or all outside of cocodiff_compile.denoising"
            )
    return ""
