# SPDX-License-Identifier: Apache-2.0
"""The machine as a graph, and how it folds back into axes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.presets import PRESETS
from cocodiff_compile.topology.rank_graph import Box, fold, graph_of_boxes, rank_graph

FAST = Link("fast", 1e11, 2e11, 1e-6)
SLOW = Link("slow", 1e9, 2e9, 1e-4)


@given(st.sampled_from(["aurora", "dgx-h100", "flat"]), st.integers(2, 12), st.booleans())
def test_presets_survive_the_graph(name: str, size: int, whole_nodes: bool) -> None:
    per_node = {"aurora": 12, "dgx-h100": 8, "flat": 1}[name]
    num_ranks = size * per_node if whole_nodes else min(2 * (size // 2), per_node) or size
    topology = PRESETS[name](num_ranks if name != "flat" else size)
    assert fold(rank_graph(topology)) == topology


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_any_grid_survives_the_graph_whatever_its_speeds(sizes: list[int], data: Any) -> None:
    speeds = data.draw(st.permutations([10.0 ** (9 + n) for n in range(len(sizes))]))
    shared = data.draw(st.lists(st.floats(1, 8), min_size=len(sizes), max_size=len(sizes)))
    axes = tuple(
        Axis(f"a{n}", size, Link(f"l{n}", speed, 2 * speed, 1e-6, per_link))
        for n, (size, speed, per_link) in enumerate(zip(sizes, speeds, shared, strict=True))
    )
    topology = Topology("grid", axes, 1e9)
    assert fold(rank_graph(topology)) == topology


def test_aurora_has_one_xe_link_port_per_gpu_and_8_nics_per_node() -> None:
    graph = rank_graph(PRESETS["aurora"](24))
    kinds = Counter(kind for _, kind in graph.nodes(data="kind"))
    assert kinds == {"rank": 24, "nic": 12 + 2 * 8, "switch": 12 + 2 + 1}
    ports = [n for n, its in graph.nodes.items() if its["kind"] == "nic"]
    ranks_per_nic = Counter(
        sum(graph.nodes[other]["kind"] == "rank" for other in graph[nic]) for nic in ports
    )
    assert ranks_per_nic == {2: 12 + 8, 1: 8}  # 12 ranks on 8 NICs: every other one is shared


def test_a_slower_link_between_the_same_ranks_adds_no_axis() -> None:
    boxes = [Box("bus", SLOW, (0, 1, 2, 3)), Box("fabric", FAST, (0, 1, 2, 3))]
    topology = fold(graph_of_boxes("two buses", 1e9, range(4), boxes))
    assert topology.axes == (Axis("fabric", 4, FAST),)


def test_a_graph_of_plain_links_folds_without_switches() -> None:
    graph: nx.Graph[object] = nx.Graph(name="ring", copy_bytes_per_s=1e9)
    graph.add_nodes_from(range(4), kind="rank")
    graph.add_edges_from([(0, 1), (2, 3)], link=FAST)
    graph.add_edges_from([(0, 2), (1, 3), (0, 3)], link=SLOW)
    assert fold(graph).axes == (Axis("fast", 2, FAST), Axis("slow", 2, SLOW))


@pytest.mark.parametrize(
    ("ranks", "boxes", "message"),
    [
        (range(5), [(FAST, (0, 1)), (FAST, (2, 3, 4))], "joins ranks 0-1 and ranks 2-4; allowed"),
        (range(4), [(FAST, (0, 2)), (FAST, (1, 3))], "joins ranks 0, 2; allowed: consecutive"),
        (range(6), [(FAST, (1, 2)), (FAST, (3, 4))], "joins ranks 1-2; .* a multiple of 2"),
        (range(4), [(FAST, (0, 1)), (SLOW, (0, 1, 2, 3))], "'fast' does not reach ranks 2-3"),
        (range(4), [(FAST, (0, 1)), (FAST, (2, 3))], "no link joins ranks 0-1 with ranks 2-3"),
        ((0, 1, 3), [(FAST, (0, 1, 3))], "rank 2 missing"),
        (
            range(6),
            [(FAST, (0, 1)), (FAST, (2, 3)), (FAST, (4, 5)), (SLOW, (0, 1, 2)), (SLOW, (3, 4, 5))],
            "'slow' joins ranks 0-2, 3 of them, and cuts boxes of 2 ranks",
        ),
    ],
)
def test_what_does_not_fold_is_refused_and_names_the_ranks(
    ranks: Any, boxes: list[tuple[Link, tuple[int, ...]]], message: str
) -> None:
    listed = [Box(link.name, link, members) for link, members in boxes]
    with pytest.raises(ValueError, match=message):
        fold(graph_of_boxes("odd", 1e9, ranks, listed))
