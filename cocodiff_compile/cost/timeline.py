# SPDX-License-Identifier: Apache-2.0
"""Records who did what when in one step of one rank, be it estimated, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Work: TypeAlias = 'Literal["matmul", "attention", "kernel"]'
SpanKind: TypeAlias = 'Literal["matmul", "attention", "kernel", "start", "wait", "exchange"]'

COMPUTE = "compute"
"""The lane of kernels, of calls that start a collective, and of waits for one."""


@dataclass(frozen=True)
class Span:
    """A lane was busy with one thing. Spans of kind "exchange" are collectives under way."""

    lane: str
    name: str
    kind: SpanKind
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Timeline:
    """One step: the lane `COMPUTE`, and a lane for each set of links or thread of collectives."""

    spans: tuple[Span, ...]

    @property
    def lanes(self) -> list[str]:
        """Returns every lane once, `COMPUTE` first."""
        return [COMPUTE, *sorted({span.lane for span in self.spans} - {COMPUTE})]

    @property
    def step_s(self) -> float:
        """The time until the compute stream has nothing left to do."""
        return max((span.end_s for span in self.spans if span.lane == COMPUTE), default=0.0)

    @property
    def compute_s(self) -> float:
        return sum(s.seconds for s in self.spans if s.lane == COMPUTE and s.kind != "wait")

    @property
    def exposed_s(self) -> float:
        """The time in which the compute stream stands still for a collective."""
        return sum(span.seconds for span in self.spans if span.kind == "wait")

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.step_s if self.step_s else 0.0

    @property
    def in_flight_s(self) -> float:
        """The time in which at least one collective is under way, hidden or not."""
        return _covered_s(span for span in self.spans if span.kind == "exchange")

    def between(self, begin_s: float, end_s: float) -> Timeline:
        """Returns the part that lies in this time, which becomes time 0."""
        inside = (span for span in self.spans if span.end_s > begin_s and span.begin_s < end_s)
        return Timeline(
            tuple(
                replace(
                    span,
                    begin_s=max(span.begin_s, begin_s) - begin_s,
                    end_s=min(span.end_s, end_s) - begin_s,
                )
                for span in inside
            )
        )


def _covered_s(spans: Iterable[Span]) -> float:
    """Returns the seconds that at least one span covers."""
    covered_s, until_s = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin_s):
        covered_s += max(0.0, span.end_s - max(until_s, span.begin_s))
        until_s = max(until_s, span.end_s)
    return covered_s
