# SPDX-License-Identifier: Apache-2.0
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
from cocodiff_compile.v_major.payload import UNCOMPRESSED, Payload
from cocodiff_compile.v_major.policy import Fixed, Policy, StepFacts
from cocodiff_compile.v_major.selective_call import SelectiveCall, Variant

CODED = Payload.uniform(4)
INTRA = Payload.uniform(8, is_intra_coded=True)
FULL_BYTES = 50
"""Bytes that an exact call sends; an uncompressed one sends another number, to tell them apart."""
every_first = pytest.mark.parametrize("first", [UNCOMPRESSED, INTRA], ids=str)


@dataclass
class Compiled:
    """A selective call whose graph doubles its input; what was compiled, and what each call of it
    was given.
    """

    policy: Policy = field(default_factory=lambda: Fixed(CODED))
    budget_bytes: float | None = None
    num_caches: int = 2
    compiled: list[Payload | None] = field(default_factory=list)
    calls: list[tuple[Payload | None, list[Tensor]]] = field(default_factory=list)
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

    def _compile(self, payload: Payload | None) -> Variant:
        self.compiled.append(payload)
        count = 0 if payload is None else self.num_caches
        with FakeTensorMode():
            fakes = [torch.empty(4, dtype=torch.float16) for _ in range(count)]

        def run(args: list[Any]) -> Tensor:
            x, _, *caches = args
            args.clear()
            self.calls.append((payload, list(caches)))
            if self.fails:
                raise KeyError("from the graph")
            if caches and self.policy.measures_drift:
                worst = self.drift if self.worst is None else self.worst
                caches[-1].copy_(torch.tensor([self.drift, worst]))
            return 2 * x

        sent_bytes = FULL_BYTES if payload is None else 10 + sum(payload.bits)
        return Variant(run, tuple(fakes), sent_bytes)

    def __call__(self, weight: Tensor | None = None) -> Payload | None:
        """Calls the graph once, checks the result and returns the payload that was carried."""
        weight = WEIGHT if weight is None else weight
        assert torch.equal(self.call([torch.ones(2), weight]), torch.full((2,), 2.0))
        return self.calls[-1][0]


WEIGHT, OTHER = torch.ones(3), torch.zeros(3)


def kinds(compiled: Compiled, run: Denoising, count: int) -> list[Payload | None]:
    """Returns the payloads of the next `count` steps, with one call in each."""
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
    first: Payload = UNCOMPRESSED
    usual: Payload = CODED

    @property
    def payloads(self) -> tuple[Payload, ...]:
        return (self.first, self.usual)

    def choose(self, facts: StepFacts) -> Payload:
        self.heard.append(facts)
        return CODED
