# SPDX-License-Identifier: Apache-2.0
"""Timelines of hand-made programs on hand-made machines, worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cocodiff_compile.cost.clock import run_in_order
from cocodiff_compile.cost.exchanges import phase_seconds
from cocodiff_compile.cost.tasks import Task, captured_order
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.topology.axes import Axis, Link, Topology

# One rank sends half of 8 MB along an axis of 2: 4 ms at 1 GB/s, behind 1 ms of latency.
SIZE = 8e6
SLOW = Link("slow", 1e9, 2e9, latency_s=1e-3)
FAST = Link("fast", 4e9, 8e9, latency_s=1e-3)
MACHINE = Topology("two links", (Axis("x", 2, FAST), Axis("y", 2, SLOW)), copy_bytes_per_s=1e12)


def _start(name: str, *axes: str) -> Task:
    seconds = phase_seconds(MACHINE, axes, SIZE)
    links = tuple(MACHINE.axis(axis).link.name for axis in axes)
    return Task(name, "start", (), exchange_s=seconds, busy_s=seconds, links=links)


def _wait(start: int) -> Task:
    return Task("wait", "wait", (start,))


def _compute(milliseconds: float) -> Task:
    return Task("kernel", "compute", (), milliseconds * 1e-3)


def _timeline(*tasks: Task) -> Timeline:
    return run_in_order(tasks, captured_order(tasks)).timeline


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 9)


@pytest.mark.parametrize(
    ("tasks", "step_ms", "exposed_ms"),
    [
        pytest.param((_start("a", "y"), _compute(3), _wait(0)), 5, 2, id="hidden up to its wait"),
        pytest.param((_start("a", "y"), _wait(0), _compute(3)), 8, 5, id="waited for at once"),
        pytest.param((_start("a", "y"), _compute(9), _wait(0)), 9, 0, id="waited for late"),
        pytest.param((), 0, 0, id="nothing to do"),
    ],
)
def test_computation_hides_an_exchange_up_to_its_wait(
    tasks: tuple[Task, ...], step_ms: float, exposed_ms: float
) -> None:
    timeline = _timeline(*tasks)
    assert (_ms(timeline.step_s), _ms(timeline.exposed_s)) == (step_ms, exposed_ms)
    assert timeline.step_s == pytest.approx(timeline.compute_s + timeline.exposed_s)


def test_exchanges_on_the_same_links_run_one_after_the_other() -> None:
    timeline = _timeline(_start("a", "y"), _start("b", "y"), _wait(1), _wait(0))
    exchanges = [span for span in timeline.spans if span.lane == "slow"]
    assert [(span.name, _ms(span.begin_s), _ms(span.end_s)) for span in exchanges] == [
        ("a", 0, 5),
        ("b", 5, 10),
    ]


def test_exchanges_on_different_links_run_side_by_side() -> None:
    timeline = _timeline(_start("a", "x"), _start("b", "y"), _wait(0), _wait(1))
    assert _ms(timeline.step_s) == 5  # fast: 1 + 1 ms, slow: 1 + 4
    assert _ms(timeline.in_flight_s) == 5


def test_a_wait_is_for_its_own_exchange() -> None:
    tasks = (_start("a", "x"), _start("b", "y"), _wait(0), _compute(1), _wait(1))
    waits = [span for span in _timeline(*tasks).spans if span.kind == "wait"]
    assert [(_ms(span.begin_s), _ms(span.end_s)) for span in waits] == [(0, 2), (3, 5)]


def test_time_in_flight_counts_no_moment_twice() -> None:
    begun = (_start("b", "y"), _compute(1), _start("a", "x"), _compute(3))
    # b from 0 to 5, a from 1 to 3, c from 4 to 6.
    assert _ms(_timeline(*begun, _start("c", "x"), _wait(0), _wait(4)).in_flight_s) == 6


def test_a_start_is_computation_before_its_exchange() -> None:
    start = Task("a", "start", (), 2e-3, light_s=1e-3, exchange_s=4e-3, busy_s=4e-3, links=("n",))
    spans = _timeline(start, _wait(0)).spans
    assert [(span.lane, span.kind, _ms(span.begin_s), _ms(span.end_s)) for span in spans] == [
        ("compute", "start", 0, 3),
        ("n", "exchange", 3, 7),
        ("compute", "wait", 3, 7),
    ]


def test_spans_of_one_lane_never_overlap() -> None:
    tasks: list[Task] = []
    for number in range(5):
        first = len(tasks)
        tasks += [_start("a", "x", "y"), _compute(1), _start("b", "x"), _start("c", "y")]
        tasks += [_wait(first), _compute(number), _wait(first + 2)]
    timeline = _timeline(*tasks)
    assert timeline.lanes == ["compute", "fast", "fast, slow", "slow"]
    for lane in timeline.lanes:
        for before, after in pairwise(span for span in timeline.spans if span.lane == lane):
            assert before.end_s <= after.begin_s, lane
