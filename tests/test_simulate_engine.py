"""Timelines of hand-made programs, worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cocodiff_compile.cost.exchanges import phase_seconds
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.lab.simulate.engine import demand, simulate_program
from cocodiff_compile.lab.simulate.program import Compute, Start, Wait, joined
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.presets import aurora

# One rank sends half of 8 MB along an axis of 2: 4 ms at 1 GB/s, behind 1 ms of latency.
SIZE = 8e6
SLOW = Link("slow", 1e9, 2e9, latency_s=1e-3)
FAST = Link("fast", 4e9, 8e9, latency_s=1e-3)
MACHINE = Topology("two links", (Axis("x", 2, FAST), Axis("y", 2, SLOW)), copy_bytes_per_s=1e12)
SHARED = Topology("one link", (Axis("x", 2, SLOW), Axis("y", 2, SLOW)), copy_bytes_per_s=1e12)

X, Y = ("x",), ("y",)


def _compute(milliseconds: float) -> Compute:
    return Compute("kernel", "matmul", milliseconds * 1e-3)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 9)


def test_a_collective_alone_takes_what_the_cost_model_says() -> None:
    for topology in (MACHINE, aurora(12), aurora(96)):
        axes = tuple(axis.name for axis in topology.axes)
        for phase in (axes[:1], axes[1:], axes):
            program = (Start("a", 0, phase, 48e6), Wait(0))
            expected = phase_seconds(topology, phase, 48e6)
            assert simulate_program(program, topology).step_s == pytest.approx(expected)


def test_latency_comes_before_bytes_and_links_work_side_by_side() -> None:
    asked = demand(MACHINE, ("x", "y"), SIZE)
    # 1 message over fast, 2 over slow, 2 MB each: 0.5 ms and 4 ms.
    assert _ms(asked.latency_s) == 3
    assert {name: _ms(seconds) for name, seconds in asked.link_s.items()} == {
        "fast": 0.5,
        "slow": 4,
    }


def test_computation_hides_a_collective_up_to_its_wait() -> None:
    timeline = simulate_program((Start("a", 0, Y, SIZE), _compute(3), Wait(0)), MACHINE)
    assert _ms(timeline.step_s) == 5
    assert _ms(timeline.compute_s) == 3
    assert _ms(timeline.exposed_s) == 2
    assert _ms(timeline.in_flight_s) == 5


def test_a_wait_at_once_hides_nothing() -> None:
    timeline = simulate_program((Start("a", 0, Y, SIZE), Wait(0), _compute(3)), MACHINE)
    assert (_ms(timeline.step_s), _ms(timeline.exposed_s)) == (8, 5)


def test_a_late_wait_costs_nothing() -> None:
    timeline = simulate_program((Start("a", 0, Y, SIZE), _compute(9), Wait(0)), MACHINE)
    assert (_ms(timeline.step_s), _ms(timeline.exposed_s)) == (9, 0)


def test_collectives_of_one_group_run_one_after_the_other() -> None:
    program = (Start("a", 0, Y, SIZE), Start("b", 1, Y, SIZE), Wait(1), Wait(0))
    timeline = simulate_program(program, MACHINE)
    assert _ms(timeline.step_s) == 10
    groups = [span for span in timeline.spans if span.track == "group y"]
    assert [(span.name, _ms(span.start_s), _ms(span.end_s)) for span in groups] == [
        ("a", 0, 5),
        ("b", 5, 10),
    ]


def test_groups_on_different_links_run_side_by_side() -> None:
    program = (Start("a", 0, X, SIZE), Start("b", 1, Y, SIZE), Wait(0), Wait(1))
    timeline = simulate_program(program, MACHINE)
    assert _ms(timeline.step_s) == 5  # fast: 1 + 1 ms, slow: 1 + 4
    assert _ms(timeline.in_flight_s) == 5


def test_a_wait_is_for_its_own_collective() -> None:
    program = (Start("a", 0, X, SIZE), Start("b", 1, Y, SIZE), Wait(0), Wait(1), _compute(1))
    assert _ms(simulate_program(program, MACHINE).step_s) == 6


def test_time_in_flight_counts_no_moment_twice() -> None:
    begun = (Start("b", 0, Y, SIZE), _compute(1), Start("a", 1, X, SIZE), _compute(3))
    timeline = simulate_program((*begun, Start("c", 2, X, SIZE), Wait(0), Wait(2)), MACHINE)
    # b from 0 to 5, a from 1 to 3, c from 4 to 6.
    assert _ms(timeline.in_flight_s) == 6


def test_groups_on_the_same_link_share_it() -> None:
    program = (Start("a", 0, X, SIZE), Start("b", 1, Y, SIZE), Wait(0), Wait(1))
    assert _ms(simulate_program(program, SHARED).step_s) == 9  # 1 ms latency, 4 + 4 ms on the link


def test_a_link_is_shared_only_while_both_use_it() -> None:
    program = (Start("a", 0, X, SIZE), _compute(2), Start("b", 1, Y, SIZE), Wait(0), Wait(1))
    timeline = simulate_program(program, SHARED)
    ends = {span.name: _ms(span.end_s) for span in timeline.spans if span.track.startswith("group")}
    # a alone from 1 to 3, 2 ms left; b joins at 3: a ends at 7, b has 2 ms left and ends at 9.
    assert ends == {"a": 7, "b": 9}


def test_a_collective_nobody_waits_for_still_ends_the_step() -> None:
    timeline = simulate_program((_compute(1), Start("a", 0, Y, SIZE)), MACHINE)
    assert (_ms(timeline.step_s), _ms(timeline.exposed_s)) == (6, 5)


def test_waiting_for_what_never_started_is_an_error() -> None:
    with pytest.raises(InvariantError, match="never started"):
        simulate_program((_compute(1), Wait(7)), MACHINE)


def test_an_empty_program_takes_no_time() -> None:
    timeline = simulate_program((), MACHINE)
    assert (timeline.step_s, timeline.exposed_share) == (0, 0)


def test_spans_of_one_track_never_overlap() -> None:
    program = joined(
        [(Start("a", 0, X, SIZE), _compute(1), Start("b", 1, Y, SIZE), Wait(0), _compute(2))] * 5
    )
    timeline = simulate_program(program, SHARED)
    for track in {span.track for span in timeline.spans}:
        spans = sorted(
            (span for span in timeline.spans if span.track == track), key=lambda s: s.start_s
        )
        for before, after in pairwise(spans):
            assert before.end_s <= after.start_s + 1e-12, track


def test_pieces_are_joined_with_tickets_of_their_own() -> None:
    piece = (Start("a", 0, Y, SIZE), Start("b", 1, Y, SIZE), Wait(0))
    program = joined([piece, (_compute(1),), piece])
    assert [step.ticket for step in program if not isinstance(step, Compute)] == [0, 1, 0, 2, 3, 2]
