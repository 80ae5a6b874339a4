"""What an order of tasks is estimated to save: times before and after, exchange by exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocodiff_compile.cost.clock import Clock, Span, run_in_order
from cocodiff_compile.cost.tasks import Task, Tasks, captured_order
from cocodiff_compile.schedule.list_schedule import list_schedule


@dataclass(frozen=True)
class ExchangeEstimate:
    """One exchange: how long it is on the links, and how long the rank stands still for it."""

    name: str
    site: int
    begin_s: float
    end_s: float
    exposed_s: float
    behind: tuple[str, ...]
    """What computes while it is on the links, the longest first."""

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.end_s - self.begin_s - self.exposed_s)


@dataclass(frozen=True)
class OrderEstimate:
    """A program in one order."""

    step_s: float
    compute_s: float
    exposed_s: float
    exchanges: tuple[ExchangeEstimate, ...]
    spans: tuple[Span, ...]
    """When each task runs."""


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
        return 1 - self.after.step_s / self.before.step_s if self.before.step_s else 0.0


def estimate_schedule(tasks: Tasks) -> ScheduleEstimate:
    scheduled = list_schedule(tasks)
    return ScheduleEstimate(
        tuple(tasks),
        scheduled.order,
        _estimate(run_in_order(tasks, captured_order(tasks))),
        _estimate(scheduled.clock),
    )


def _estimate(clock: Clock) -> OrderEstimate:
    return OrderEstimate(
        clock.now_s,
        clock.computed_s,
        clock.exposed_s,
        tuple(_exchanges(clock)),
        tuple(clock.spans),
    )


def _exchanges(clock: Clock) -> list[ExchangeEstimate]:
    tasks = clock.tasks
    computing = [span for span in clock.spans if tasks[span.place].kind == "compute"]
    exposed = {
        tasks[span.place].needs[0]: span.seconds
        for span in clock.spans
        if tasks[span.place].kind == "wait"
    }
    found = []
    first = 0
    for span in (span for span in clock.spans if tasks[span.place].kind == "start"):
        while first < len(computing) and computing[first].end_s <= span.begin_s:
            first += 1
        task = tasks[span.place]
        behind = _behind(tasks, computing, first, span)
        found.append(
            ExchangeEstimate(
                task.name,
                task.site,
                span.begin_s,
                span.end_s,
                exposed.get(span.place, 0.0),
                behind,
            )
        )
    return found


_NAMED = 3


def _behind(tasks: Tasks, computing: Sequence[Span], first: int, span: Span) -> tuple[str, ...]:
    """Names of what computes during `span`, beginning to look at `first`."""
    shared: list[tuple[float, str]] = []
    for other in computing[first:]:
        if other.begin_s >= span.end_s:
            break
        seconds = min(other.end_s, span.end_s) - max(other.begin_s, span.begin_s)
        if seconds > 0:
            shared.append((seconds, tasks[other.place].name))
    shared.sort(key=lambda item: -item[0])
    return tuple(name for _, name in shared[:_NAMED])
