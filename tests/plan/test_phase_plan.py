# SPDX-License-Identifier: Apache-2.0
"""Plans and their costs: counts, the published micro-benchmark, and the choice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.cost.exchanges import (
    exchange_seconds,
    messages_per_exchange,
    phase_seconds,
    traffic,
)
from cocodiff_compile.cost.phase_plan import MIN_GAIN, plan_phases
from cocodiff_compile.topology.axes import Axis, Topology
from cocodiff_compile.topology.phases import all_phases
from cocodiff_compile.topology.presets import ANY, PRESETS

MB = 1e6


def _aurora(num_ranks: int = 12) -> Topology:
    return PRESETS["aurora"](num_ranks)


def _flat(topology: Topology) -> tuple[tuple[str, ...], ...]:
    return all_phases(topology)[0]


def _tile_first(topology: Topology) -> tuple[tuple[str, ...], ...]:
    rest = tuple(axis.name for axis in topology.axes if axis.name != "tile")
    return (("tile",), rest)


@pytest.mark.parametrize(
    ("nodes", "flat", "tile_first"), [(1, 132, 72), (2, 552, 288), (4, 2256, 1152), (8, 9120, 4608)]
)
def test_messages_are_those_of_the_published_formulas(
    nodes: int, flat: int, tile_first: int
) -> None:
    topology = _aurora(12 * nodes)
    assert messages_per_exchange(topology, _flat(topology)) == flat
    assert messages_per_exchange(topology, _tile_first(topology)) == tile_first


@pytest.mark.parametrize("num_ranks", [12, 24, 96])
def test_bytes_over_the_slow_links_do_not_depend_on_the_phases(num_ranks: int) -> None:
    topology = _aurora(num_ranks)
    slow = topology.axes[-1].link
    for phases in all_phases(topology):
        sent = [
            flow.size_bytes
            for phase in phases
            for flow in traffic(topology, phase, 48 * MB)
            if flow.link is slow
        ]
        outermost = topology.axes[-1].size
        assert math.isclose(sum(sent), 48 * MB * (outermost - 1) / outermost)


@pytest.mark.parametrize(
    ("what", "published"),
    [("flat 48 MB", 25.5), ("GPU phase 48 MB", 6.0), ("tile phase 48 MB", 0.5)],
)
def test_the_fit_is_within_15_percent_of_the_published_times(what: str, published: float) -> None:
    topology = _aurora()
    milliseconds = {
        "flat 48 MB": exchange_seconds(topology, _flat(topology), 48 * MB) * 1e3,
        "GPU phase 48 MB": phase_seconds(topology, ("gpu",), 48 * MB) * 1e3,
        "tile phase 48 MB": phase_seconds(topology, ("tile",), 48 * MB) * 1e3,
    }
    assert milliseconds[what] == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("size_mb", "published"), [(48, 25.5 / 6.5), (24, 3.0), (6, 1.0)])
def test_the_fit_is_within_15_percent_of_the_published_ratios(
    size_mb: float, published: float
) -> None:
    topology = _aurora()
    flat = exchange_seconds(topology, _flat(topology), size_mb * MB)
    phased = exchange_seconds(topology, _tile_first(topology), size_mb * MB)
    assert flat / phased == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 1), (12, 3), (96, 13)])
def test_every_ordered_way_to_phase_the_axes_once(num_ranks: int, count: int) -> None:
    topology = _aurora(num_ranks)
    plans = all_phases(topology)
    assert len(plans) == len(set(plans)) == count
    names = sorted(axis.name for axis in topology.axes)
    for phases in plans:
        assert sorted(name for phase in phases for name in phase) == names
        assert all(phases) and len(phases) <= 3


@given(st.floats(1e3, 1e9), st.sampled_from([4, 12, 24, 96]))
def test_on_is_the_cheapest_phased_and_auto_takes_it_for_its_gain(
    size: float, num_ranks: int
) -> None:
    topology = _aurora(num_ranks)
    flat, *phased = (exchange_seconds(topology, p, size) for p in all_phases(topology))
    auto, on = plan_phases(topology, size), plan_phases(topology, size, "on")
    assert not on.is_flat
    assert on.seconds == pytest.approx(min(phased), rel=1e-8)
    assert auto == (
        on if on.seconds < (1 - MIN_GAIN) * flat else plan_phases(topology, size, "off")
    )
    assert plan_phases(topology, size, "off").is_flat


def test_of_equal_costs_the_inner_axes_go_first() -> None:
    for size in (0.02 * MB, 0.2 * MB, MB, 6 * MB):
        assert str(plan_phases(_aurora(96), size, "on")) == "tile | gpu | node"


def test_flows_of_one_link_share_it() -> None:
    axes = (Axis("in", 4, ANY), Axis("out", 6, ANY))
    split, whole = Topology("split", axes, 1e9), Topology("whole", (Axis("all", 24, ANY),), 1e9)
    assert traffic(split, ("in", "out"), MB) == traffic(whole, ("all",), MB)
    assert phase_seconds(split, ("in", "out"), MB) == phase_seconds(whole, ("all",), MB)


def test_one_rank_exchanges_nothing() -> None:
    assert plan_phases(_aurora(1), MB).seconds == 0


def test_nothing_to_split_along_is_flat_and_an_error_when_asked_for() -> None:
    topology = PRESETS["flat"](8)
    assert plan_phases(topology, MB).is_flat
    with pytest.raises(ValueError, match="needs a topology with two axes or more"):
        plan_phases(topology, MB, "on")


@pytest.mark.parametrize(("phases_of", "text"), [(_flat, "flat"), (_tile_first, "tile | gpu+node")])
def test_a_plan_reads_as_its_phases(phases_of: object, text: str) -> None:
    topology = _aurora(24)
    plan = plan_phases(topology, 48 * MB, "off")
    phased = type(plan)(phases_of(topology), 0.0)  # type: ignore[operator]
    assert str(phased) == text
