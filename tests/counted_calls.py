"""A compiled graph as a plain function, which tells the kind of step it was called in; and a policy
that keeps what it was told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cocodiff_compile.compat import FakeTensorMode
from cocodiff_compile.v_major.denoising import Denoising
from cocodiff_compile.v_major.policy import Fixed, Policy, StepFacts
from cocodiff_compile.v_major.selective_call import SelectiveCall, Variant
from cocodiff_compile.v_major.travel import IN_FULL, Travel

CODED = Travel.all_in(4)
ANEW = Travel.all_in(8, is_anew=True)
FULL_BYTES = 50
"""That an exact call sends; not those of a call in full, so that both can be told apart."""
every_first = pytest.mark.parametrize("first", [IN_FULL, ANEW], ids=str)


@dataclass
class Compiled:
    """A selective call whose graph doubles its input; what was compiled, and what each call of it
    was given.
    """

    policy: Policy = field(default_factory=lambda: Fixed(CODED))
    budget_bytes: float | None = None
    num_memories: int = 2
    compiled: list[Travel | None] = field(default_factory=list)
    calls: list[tuple[Travel | None, list[Tensor]]] = field(default_factory=list)
    drift: float = 0.0
    worst: float | None = None
    """None: as the drift."""
    fails: bool = False
    groups: tuple[str, ...] = ("0",)

    def __post_init__(self) -> None:
        self.call = SelectiveCall(
            self._compile,
            self.policy,
            self.groups,
            torch.device("cpu"),
            (1,),
            FULL_BYTES,
            self.budget_bytes,
        )

    def _compile(self, travel: Travel | None) -> Variant:
        self.compiled.append(travel)
        count = 0 if travel is None else self.num_memories
        with FakeTensorMode():
            fakes = [torch.empty(4, dtype=torch.float16) for _ in range(count)]

        def run(args: list[Any]) -> Tensor:
            x, _, *memories = args
            args.clear()
            self.calls.append((travel, list(memories)))
            if self.fails:
                raise KeyError("from the graph")
            if memories and self.policy.measures_drift:
                worst = self.drift if self.worst is None else self.worst
                memories[-1].copy_(torch.tensor([self.drift, worst]))
            return 2 * x

        sent_bytes = FULL_BYTES if travel is None else 10 + sum(travel.bits)
        return Variant(run, tuple(fakes), sent_bytes)

    def __call__(self, weight: Tensor | None = None) -> Travel | None:
        """What the call carried, checked for its value."""
        weight = WEIGHT if weight is None else weight
        assert torch.equal(self.call([torch.ones(2), weight]), torch.full((2,), 2.0))
        return self.calls[-1][0]


WEIGHT, OTHER = torch.ones(3), torch.zeros(3)


def kinds(compiled: Compiled, run: Denoising, count: int) -> list[Travel | None]:
    """What each of some steps carries, one call in each."""
    found = []
    for _ in range(count):
        found.append(compiled())
        run.step()
    return found


@dataclass
class Listening:
    """A policy that keeps what it was told."""

    heard: list[StepFacts] = field(default_factory=list)
    measures_drift: bool = True
    first: Travel = IN_FULL
    usual: Travel = CODED

    @property
    def travels(self) -> tuple[Travel, ...]:
        return (self.first, self.usual)

    def choose(self, facts: StepFacts) -> Travel:
        self.heard.append(facts)
        return CODED
