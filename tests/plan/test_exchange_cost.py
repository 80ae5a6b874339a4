# SPDX-License-Identifier: Apache-2.0
"""Tests the costs of exchanges on small machines whose numbers can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cocodiff_compile.cost.exchanges import (
    alone_seconds,
    busy_seconds,
    copy_seconds,
    exchange_seconds,
    is_measured,
    messages_per_exchange,
    phase_seconds,
    traffic,
)
from cocodiff_compile.cost.phase_plan import plan_phases
from cocodiff_compile.topology.axes import MAX_AXES, Axis, Link, Topology
from cocodiff_compile.topology.measured_phase import IN_FLIGHT, REACH, MeasuredPhase
from cocodiff_compile.topology.phases import all_phases

KB = 1024.0
FAST = Link("fast", 1024.0, 2048.0, latency_s=1.0, unaligned_from_bytes=KB)
SLOW = Link("slow", 512.0, 1024.0, latency_s=2.0)
SHARED = replace(SLOW, name="shared", unaligned_from_bytes=KB, ranks_per_link=2)


def _machine(inner: Link = FAST, outer: Link = SLOW) -> Topology:
    return Topology("two", (Axis("in", 2, inner), Axis("out", 2, outer)), copy_bytes_per_s=1024.0)


def test_traffic_of_outer_axes_does_not_make_an_inner_link_unaligned() -> None:
    """Each rank sends 1 message over the inner link and 2 over the outer one in a phase along both
    axes. No axis lies inside of the inner one: its link is as fast as alone, however much goes over
    the other.
    """
    inner = replace(SLOW, unaligned_from_bytes=KB)
    outer = replace(FAST, bytes_per_s=8 * KB, both_ways_bytes_per_s=16 * KB)
    machine = _machine(inner, replace(outer, unaligned_from_bytes=None))
    by_inner_link = KB / 512  # of 4 KB, a rank's size, 1 goes over the inner link
    assert phase_seconds(machine, ("in", "out"), 4 * KB) == 2.0 + 2 * 1.0 + by_inner_link


def test_an_outer_link_slows_down_where_inner_neighbours_take_part_only() -> None:
    machine = _machine(inner=SLOW, outer=SHARED)
    bandwidth = 512.0 / 2
    aligned = phase_seconds(machine, ("out",), 4 * KB)
    assert aligned == 2.0 + 2 * KB / bandwidth
    together = phase_seconds(machine, ("in", "out"), 4 * KB)
    assert together == 2.0 + 2 * 2.0 + 2 * KB / bandwidth * 3
    below = phase_seconds(machine, ("in", "out"), KB / 2)
    assert below == 2.0 + 2 * 2.0 + KB / 4 / bandwidth


def test_messages_and_bytes_by_link() -> None:
    flows = traffic(_machine(), ("in", "out"), 4 * KB)
    assert [(flow.link.name, flow.messages, flow.size_bytes) for flow in flows] == [
        ("fast", 1, KB),
        ("slow", 2, 2 * KB),
    ]
    assert messages_per_exchange(_machine(), (("in",), ("out",))) == 4 * 2


def test_each_phase_after_the_first_costs_a_copy() -> None:
    machine = _machine()
    one, other = (phase_seconds(machine, (name,), KB) for name in ("in", "out"))
    assert copy_seconds(machine, KB) == 2.0
    assert exchange_seconds(machine, (("in",), ("out",)), KB) == one + other + 2.0
    assert exchange_seconds(machine, (("in",),), KB) == one


def _curve(axes: tuple[str, ...], seconds: float, in_flight: int = 1) -> MeasuredPhase:
    return MeasuredPhase(axes, ((1e3, seconds), (1e4, seconds)), in_flight)


def test_only_a_plan_in_phases_needs_its_copies_measured() -> None:
    measured = (_curve(("in",), 1.0), _curve(("out",), 1.0), _curve(("in", "out"), 1.0))
    machine = replace(_machine(), measured=measured)
    assert is_measured(machine, (("in", "out"),), KB)
    assert not is_measured(machine, (("in",), ("out",)), KB)
    whole = replace(machine, measured=(*measured, _curve((), 1.0)))
    assert is_measured(whole, (("in",), ("out",)), KB)


def test_what_was_measured_alone_and_with_others_is_told_apart() -> None:
    alone, busy = _curve(("in",), 5.0), _curve(("in",), 3.0, IN_FLIGHT)
    machine = replace(_machine(), measured=(alone, busy))
    assert phase_seconds(machine, ("in",), KB) == 5.0
    assert alone_seconds(machine, ("in",), KB) == 5.0
    assert busy_seconds(machine, ("in",), KB) == 3.0
    assert busy_seconds(replace(machine, measured=(alone,)), ("in",), KB) == 5.0
    assert phase_seconds(replace(machine, measured=(busy,)), ("in",), KB) != 3.0
    assert machine.measured_along(("in", "out"), KB) is None


def test_far_beyond_a_measurement_only_the_estimates_for_a_schedule_hold_on_to_it() -> None:
    far = REACH * 1e4 + 1
    machine = replace(_machine(), measured=(_curve(("in",), 5.0), _curve(("in",), 3.0, IN_FLIGHT)))
    assert phase_seconds(machine, ("in",), far) == phase_seconds(_machine(), ("in",), far)
    assert alone_seconds(machine, ("in",), far) == 5.0
    assert busy_seconds(machine, ("in",), far) == 3.0


def test_more_axes_than_phases() -> None:
    axes = tuple(Axis(f"a{place}", 2, replace(SLOW, name=f"l{place}")) for place in range(4))
    plans = all_phases(Topology("four", axes, 1.0))
    assert max(map(len, plans)) == 3
    assert len(plans) == 1 + 14 + 36
    with pytest.raises(ValueError, match=f"has {MAX_AXES + 1} axes; allowed: {MAX_AXES}"):
        Topology("many", tuple(replace(axes[0], name=str(n)) for n in range(MAX_AXES + 1)), 1.0)


def test_on_takes_phases_that_auto_would_not_compare() -> None:
    same = Topology("same", (Axis("in", 2, SLOW), Axis("out", 3, SLOW)), copy_bytes_per_s=1e9)
    assert plan_phases(same, KB).is_flat
    assert str(plan_phases(same, KB, "on")) == "in | out"


def test_a_curve_is_straight_between_any_two_of_its_points() -> None:
    curve = MeasuredPhase(("in",), ((1e3, 1.0), (2e3, 2.0), (4e3, 8.0), (5e3, 8.0)))
    assert [curve.seconds(size) for size in (1e3, 1.5e3, 2e3, 3e3, 4.5e3)] == [1, 1.5, 2, 5, 8]


@pytest.mark.parametrize(
    "points",
    [
        ((1e3, 1.0), (1e3, 1.0)),
        ((0.0, 1.0), (1.0, 1.0)),
        ((1.0, 0.0), (2.0, 0.0)),
        ((1.0, 1.0), (2.0, float("inf"))),
        ((1.0, 1.0), (2.0, float("nan"))),
    ],
)
def test_points_that_make_no_curve_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"points measured along in are .*allowed"):
        MeasuredPhase(("in",), points)


def test_of_costs_that_differ_by_a_thousandth_the_lower_wins() -> None:
    """Only the last digits of a sum do not count."""
    links = [replace(SLOW, name=name) for name in ("a", "b", "c")]
    axes = tuple(Axis(link.name, 2, link) for link in links)
    machine = Topology("three", axes, copy_bytes_per_s=1e9)
    curves = {phase: 1.0 for plan in all_phases(machine) for phase in plan}
    cheapest = (("a", "c"), ("b",))
    curves |= dict.fromkeys(cheapest, 0.999)
    measured = (*(_curve(axes, seconds) for axes, seconds in curves.items()), _curve((), 1e-6))
    plan = plan_phases(replace(machine, measured=measured), KB, "on")
    assert set(plan.phases) == set(cheapest)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"has ranks 0 to 3, not {rank}"):
        _machine().coordinates(rank)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_group_of_another_size_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"has 4 ranks .*the group has {num_ranks}"):
        _machine().for_ranks(num_ranks)


def test_ranks_along_axes_are_in_their_order() -> None:
    assert _machine().ranks_along(3, ["out", "in"]) == (0, 1, 2, 3)
    assert _machine().ranks_along(3, ["out"]) == (1, 3)
