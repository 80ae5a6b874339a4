# SPDX-License-Identifier: Apache-2.0
"""The probe over four real gloo ranks, arranged as two nodes; no test says how long it takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from cocodiff_compile.devices.cpu import LOOPBACK
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.ranks.groups import make_groups
from cocodiff_compile.ranks.live_topology import live_topology
from cocodiff_compile.ranks.probe import _curves, _phases_are_slower, _sequences, probe
from cocodiff_compile.topology.axes import Axis, Topology
from cocodiff_compile.topology.measured_phase import IN_FLIGHT
from cocodiff_compile.topology.phases import axis_sets

CPU = torch.device("cpu")
SHORT, ENOUGH_S = 1e-6, 10.0


def _grid(*sizes: int) -> Topology:
    axes = tuple(Axis(f"a{n}", size, LOOPBACK) for n, size in enumerate(sizes))
    return Topology("grid", axes, 1e9)


def test_axes_take_turns_with_the_other_axes_and_the_whole_is_alone() -> None:
    two = [(), ("a",), ("b",), ("a", "b")]
    assert _sequences(two, ["a", "b"]) == [[0, 1, 2], [3]]
    three = [(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]
    assert _sequences(three, ["a", "b", "c"]) == [[0, 1, 6], [0, 2, 5], [0, 3, 4], [7]]
    assert _sequences([(), ("a",), ("a", "b")], ["a", "b"]) == [[0, 1], [2]]


def test_phases_are_compared_within_a_reading() -> None:
    axes = [(), ("a",), ("a", "b")]
    calm = [[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]]
    loaded = [calm[0], [10.0, 20.0, 40.0], calm[2]]
    for readings in (calm, loaded):
        curves = _curves(axes, {1e4: readings, 1e5: readings})
        assert [curve.points[0][1] for curve in curves] == [1.0, 2.0, 4.0]
    odd = [[1.0, 1.0, 4.0], [1.0, 2.0, 4.0], [1.0, 9.0, 4.0]]
    assert _curves(axes, {1e4: odd, 1e5: odd})[1].seconds(1) == 2.0


def test_a_size_is_lost_if_no_phases_come_near() -> None:
    axes = [(), ("a0",), ("a1",), ("a0", "a1")]
    assert not _phases_are_slower(_grid(2, 2), axes, [0.1, 0.5, 0.5, 1.0])
    assert not _phases_are_slower(_grid(2, 2), axes, [0.1, 0.6, 0.6, 1.0])
    assert _phases_are_slower(_grid(2, 2), axes, [0.2, 0.6, 0.6, 1.0])
    assert _phases_are_slower(_grid(2, 2), axes, [0.0, 0.8, 0.6, 1.0])


def test_a_larger_size_is_never_faster() -> None:
    readings = {1e4: [[3.0, 6.0, 6.0]] * 3, 1e5: [[1.0, 4.0, 4.0]] * 3}
    assert [curve.seconds(1e5) for curve in _curves([(), ("a",), ("a", "b")], readings)] == [
        2,
        5,
        5,
    ]


def _probes(rank: int, _num_ranks: int, cache: str) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = cache
    found: dict[str, Any] = {}
    found["first"] = live_topology(CPU, budget_s=ENOUGH_S)
    found["again"] = live_topology(CPU, budget_s=ENOUGH_S)
    os.environ["XDG_CACHE_HOME"] = f"{cache}/of the one that fails"
    found["failed"] = live_topology(CPU, budget_s=SHORT)
    os.environ["COCODIFF_PROBE"] = "0"
    found["skipped"] = live_topology(CPU, budget_s=ENOUGH_S)
    grid = _grid(2, 2)
    groups = make_groups((0, 1, 2, 3), grid, axis_sets(grid))
    found["short"] = probe(groups, grid, CPU, SHORT)
    found["refused"] = probe(groups, grid, torch.device("meta"))
    if rank == 2:  # it waits for ranks that wait for it elsewhere
        groups["a0",] = groups["a0", "a1"]
    found["lost"] = probe(groups, grid, CPU, ENOUGH_S, collective_timeout_s=1.0)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    found["alive"] = ones.item()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return run_local_ranks(_probes, 4, cache, timeout_s=300, ranks_per_node=2)


pytestmark = pytest.mark.gloo


def test_emulated_nodes_are_found_and_every_phase_is_measured(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["first"]
    assert [(axis.name, axis.size) for axis in first.topology.axes] == [("local", 2), ("node", 2)]
    measured = [(phase.axes, phase.in_flight) for phase in first.topology.measured]
    axes = [("local",), ("node",), ("local", "node")]
    alone, concurrent = (
        [(names, 1) for names in ((), *axes)],
        [(names, IN_FLIGHT) for names in axes],
    )
    assert measured == alone + concurrent
    assert first.notes[-1].startswith("measured now, saved in")
    assert not any(found[what].probe_failed for found in ranks for what in ("first", "again"))


@pytest.mark.parametrize("what", ["first", "again", "skipped"])
def test_all_ranks_have_the_same_topology(ranks: list[dict[str, Any]], what: str) -> None:
    assert len({found[what].topology for found in ranks}) == 1
    assert [found[what].rank for found in ranks] == [0, 1, 2, 3]


def test_the_second_time_it_comes_from_the_cache(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["again"].topology == found["first"].topology
        assert found["again"].notes[-1].startswith("measured before")
        name = found["again"].notes[-1].split()[3]
        assert Path(name).exists()


def test_skipped_it_neither_measures_nor_reads_the_cache(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["skipped"].topology.measured == ()
        assert found["skipped"].notes == ("not measured: COCODIFF_PROBE=0",)
        assert not found["skipped"].probe_failed


def test_a_live_topology_says_that_its_probe_failed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["failed"].topology.measured == ()
        assert "used up" in found["failed"].notes[-1]
        assert found["failed"].probe_failed


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("short", "1e-06 s were used up"),
        ("refused", "failed, nothing was measured"),
        ("lost", "failed, nothing was measured: .*(?i:timed out|timeout|closed)"),
    ],
)
def test_what_fails_falls_back_with_a_reason_on_every_rank(
    ranks: list[dict[str, Any]], what: str, reason: str
) -> None:
    for found in ranks:
        assert found[what].topology == _grid(2, 2)
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found[what].reason)


def test_the_default_group_outlives_a_failed_probe(ranks: list[dict[str, Any]]) -> None:
    assert [found["alive"] for found in ranks] == [4.0] * 4
