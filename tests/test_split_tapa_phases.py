"""split-tapa-phases: phases move the same data, on every rank, for every plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch.fx import Graph, GraphModule

from cocodiff_compile.graph.aten import ALL_TO_ALL, WAIT, aten, bound, parse_all_to_all
from cocodiff_compile.graph.records import Exchange
from cocodiff_compile.passes.split_tapa_phases import split_exchange
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.groups import Machine, sketch_machine
from cocodiff_compile.topology.phase_plan import Phases, all_phases
from tests.lockstep import machine_groups, run_lockstep
from tests.traced import traced

FLAT = "all"
GRIDS = {"2x3": (2, 3), "2x2x2": (2, 2, 2), "2x6": (2, 6), "2x6x2": (2, 6, 2), "2x6x8": (2, 6, 8)}


def machine(*sizes: int) -> Machine:
    link = Link("link", 1e9, 2e9, 1e-6)
    names = ("tile", "gpu", "node")
    axes = tuple(Axis(name, size, link) for name, size in zip(names, sizes, strict=False))
    return sketch_machine(Topology("grid", axes, 1e9))


def exchange_graph(num_ranks: int, rows: int = 2, columns: int = 3) -> Graph:
    splits = [rows] * num_ranks

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_to_all_single(x, splits, splits, FLAT)
        )

    return traced(exchange, torch.zeros(rows * num_ranks, columns))


def only_exchange(graph: Graph) -> Exchange:
    (start,) = graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    found = parse_all_to_all(start)
    assert found is not None
    return Exchange(
        start, found.wait, found.source, found.wait, "in", FLAT, (), found.input_splits, 0, 0, 0
    )


def split(graph: Graph, on: Machine, phases: Phases) -> Exchange:
    exchange = only_exchange(graph)
    done = split_exchange(graph, exchange, on, phases, middle=exchange.wait)
    graph.lint()
    return done


def origins(num_ranks: int, rows: int = 2, columns: int = 3) -> list[list[torch.Tensor]]:
    """Per rank a tensor whose values name the rank and the place they come from."""
    size = num_ranks * rows * columns
    values = torch.arange(float(size)).reshape(num_ranks * rows, columns)
    return [[values + size * rank] for rank in range(num_ranks)]


@pytest.mark.parametrize("sizes", GRIDS.values(), ids=GRIDS)
def test_every_plan_moves_every_element_to_where_flat_does(sizes: Sequence[int]) -> None:
    on, num_ranks = machine(*sizes), math.prod(sizes)
    inputs, groups = origins(num_ranks), machine_groups(FLAT, on)
    flat = run_lockstep(exchange_graph(num_ranks), inputs, groups)
    for phases in all_phases(on.topology)[1:]:
        graph = exchange_graph(num_ranks)
        split(graph, on, phases)
        for rank, (ours,) in enumerate(run_lockstep(graph, inputs, groups)):
            assert torch.equal(ours, flat[rank][0]), (phases, rank)
