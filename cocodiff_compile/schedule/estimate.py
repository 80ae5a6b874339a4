# SPDX-License-Identifier: Apache-2.0
"""Estimates what an order of tasks saves: times before and after, exchange by exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocodiff_compile.cost.clock import Clock, run_in_order
from cocodiff_compile.cost.tasks import Task, Tasks, captured_order
from cocodiff_compile.cost.timeline import COMPUTE, Span, Timeline
from cocodiff_compile.schedule.list_schedule import list_schedule


@dataclass(frozen=True)
class ExchangeEstimate:
    """One exchange: when it is on the links, and how long the rank stands still for it."""

    span: Span
    site: int
    exposed_s: float
    behind: tuple[str, ...]
    """The names of the longest computations while it is on the links, the longest first."""

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.span.seconds - self.exposed_s)


@dataclass(frozen=True)
class OrderEstimate:
    """A program in one order."""

    timeline: Timeline
    exchanges: tuple[ExchangeEstimate, ...]


@dataclass(frozen=True)
class ScheduleEstimate:
    """The program as captured, and as scheduled."""

    tasks: tuple[Task, ...]
    order: tuple[int, ...]
    before: OrderEstimate
    after: OrderEstimate

    @property
    def gain(self) -> float:
        """The part of the time that the new order saves."""
        before_s = self.before.timeline.step_s
        return 1 - self.after.timeline.step_s / before_s if before_s else 0.0


def estimate_schedule(tasks: Tasks) -> ScheduleEstimate:
    """Returns the estimates of the captured order and of the one that the list scheduler finds."""
    scheduled = list_schedule(tasks)
    return ScheduleEstimate(
        tuple(tasks),
        scheduled.order,
        estimate_in_order(tasks),
        _estimate(scheduled.clock),
    )


def estimate_in_order(tasks: Tasks) -> OrderEstimate:
    """Returns the estimate of the captured order alone."""
    return _estimate(run_in_order(tasks, captured_order(tasks)))


def _estimate(clock: Clock) -> OrderEstimate:
    computing = [
        span for span in clock.spans if span.lane == COMPUTE and span.kind not in ("start", "wait")
    ]
    found = []
    first = 0
    for start, span in clock.exchanges.items():
        while first < len(computing) and computing[first].end_s <= span.begin_s:
            first += 1
        behind = _behind(computing[first:], span)
        exposed_s = clock.exposed_s.get(start, 0.0)
        found.append(ExchangeEstimate(span, clock.tasks[start].site, exposed_s, behind))
    return OrderEstimate(clock.timeline, tuple(found))


_NAMED = 3


def _behind(computing: Sequence[Span], span: Span) -> tuple[str, ...]:
    """Returns the names of what computes during `span`."""
    shared: list[tuple[float, str]] = []
    for other in computing:
        if other.begin_s >= span.end_s:
            break
        seconds = min(other.end_s, span.end_s) - max(other.begin_s, span.begin_s)
        if seconds > 0:
            shared.append((seconds, other.name))
    shared.sort(key=lambda item: -item[0])
    return tuple(name for _, name in shared[:_NAMED])
