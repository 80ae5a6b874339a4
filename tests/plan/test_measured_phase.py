# SPDX-License-Identifier: Apache-2.0
"""Curves of measured phases, and plans that rest on them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.cost.exchanges import exchange_seconds, phase_seconds
from cocodiff_compile.cost.phase_plan import MIN_GAIN, plan_phases
from cocodiff_compile.topology.axes import Axis, Topology
from cocodiff_compile.topology.files import parse_topology, topology_data
from cocodiff_compile.topology.measured_phase import REACH, MeasuredPhase, not_falling
from cocodiff_compile.topology.phases import all_phases
from cocodiff_compile.topology.presets import ANY, PRESETS

POINTS = ((1e4, 1e-3), (1e6, 2e-3), (1e7, 8e-3))


def _grid() -> Topology:
    axes = (Axis("in", 4, ANY), Axis("out", 6, ANY))
    return Topology("grid", axes, 1e9)


def _level(axes: tuple[str, ...], seconds: float) -> MeasuredPhase:
    return MeasuredPhase(axes, ((1e4, seconds), (1e7, seconds)))


def _measured(flat: float, inner: float, outer: float, copies: float) -> Topology:
    phases = ((), copies), (("in",), inner), (("out",), outer), (("in", "out"), flat)
    return replace(_grid(), measured=tuple(_level(axes, seconds) for axes, seconds in phases))


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12), st.floats(1e4, 4e7))
def test_an_affine_curve_is_reproduced(latency: float, speed: float, size: float) -> None:
    curve = MeasuredPhase(("a",), tuple((s, latency + s / speed) for s, _ in POINTS))
    assert curve.seconds(size) == pytest.approx(latency + size / speed, rel=1e-6)


def test_a_curve_is_level_below_its_first_point_and_keeps_its_bends() -> None:
    curve = MeasuredPhase(("a",), POINTS)
    assert curve.seconds(1) == 1e-3
    assert curve.seconds(1e6) == 2e-3
    assert curve.seconds(5.5e6) == pytest.approx(5e-3)
    assert curve.seconds(1.9e7) == pytest.approx(14e-3)
    assert curve.covers(REACH * 1e7) and not curve.covers(REACH * 1e7 + 1)


@pytest.mark.parametrize(
    "points",
    [(), POINTS[:1], POINTS[::-1], ((1e4, 2.0), (1e5, 1.0)), ((-1.0, 1.0), (1.0, 1.0))],
)
def test_points_that_are_no_curve_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"measured along a are .*allowed"):
        MeasuredPhase(("a",), points)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_not_falling_keeps_the_sum_and_what_already_rises(seconds: list[float]) -> None:
    fitted = not_falling(seconds)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(seconds))
    assert not_falling(sorted(seconds)) == pytest.approx(sorted(seconds))


def test_runs_that_fall_are_averaged() -> None:
    assert not_falling([3.0, 1.0, 5.0]) == [2.0, 2.0, 5.0]


def test_what_was_measured_counts_instead_of_the_links() -> None:
    topology = _measured(flat=9.0, inner=1.0, outer=2.0, copies=0.5)
    assert phase_seconds(topology, ("out", "in"), 1e6) == 9.0
    assert exchange_seconds(topology, (("in",), ("out",)), 1e6) == 3.5
    beyond = REACH * 1e7 + 1
    assert phase_seconds(topology, ("in",), beyond) == phase_seconds(_grid(), ("in",), beyond)


def test_an_axis_that_is_not_there_cannot_have_been_measured() -> None:
    with pytest.raises(ValueError, match="no axis 'up'; it has: in, out"):
        replace(_grid(), measured=(_level(("up",), 1.0),))


@pytest.mark.parametrize(("phased", "leaves"), [(1 - MIN_GAIN - 0.01, True), (0.99, False)])
def test_auto_leaves_flat_for_more_than_the_margin_only(phased: float, leaves: bool) -> None:
    topology = _measured(flat=1.0, inner=phased / 2, outer=phased / 4, copies=phased / 4)
    assert plan_phases(topology, 1e6).is_flat != leaves
    assert not plan_phases(topology, 1e6, "on").is_flat


def test_axes_of_one_link_are_parted_by_a_measurement_only() -> None:
    assert plan_phases(_grid(), 100).is_flat
    assert exchange_seconds(_grid(), (("in",), ("out",)), 100) < 0.5 * exchange_seconds(
        _grid(), (("in", "out"),), 100
    )
    topology = _measured(flat=1.0, inner=0.1, outer=0.1, copies=0.1)
    assert not plan_phases(topology, 100).is_flat
    assert plan_phases(topology, REACH * 1e7 + 1).is_flat


def test_a_phase_without_a_measurement_does_not_compete_with_a_measured_flat() -> None:
    topology = _measured(flat=1.0, inner=1e-9, outer=1e-9, copies=1e-9)
    for missing in range(3):
        left = tuple(phase for n, phase in enumerate(topology.measured) if n != missing)
        assert plan_phases(replace(topology, measured=left), 1e6).is_flat


def test_flat_measured_alone_does_not_change_the_plan_to_the_links() -> None:
    aurora = PRESETS["aurora"](12)
    assert not plan_phases(aurora, 48e6).is_flat
    flat = all_phases(aurora)[0][0]
    measured = MeasuredPhase(flat, ((1e6, 1.0), (5e7, 2.0)))
    assert plan_phases(replace(aurora, measured=(measured,)), 48e6).is_flat


@given(st.floats(1e-9, 1e3), st.sampled_from([4, 24, 96]))
def test_topologies_survive_json(seconds: float, num_ranks: int) -> None:
    aurora = PRESETS["aurora"](num_ranks)
    topology = replace(aurora, measured=(_level(("tile",), seconds), _level((), seconds)))
    back = parse_topology(json.loads(json.dumps(topology_data(topology))))
    assert back == topology and hash(back) == hash(topology)
