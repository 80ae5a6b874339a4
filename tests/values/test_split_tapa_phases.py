# SPDX-License-Identifier: Apache-2.0
"""split-tapa-phases: phases move the same data, on every rank, for every plan."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.compiler.explain import explain
from cocodiff_compile.cost.exchanges import messages_per_exchange, traffic
from cocodiff_compile.decide.phases import choose_phases
from cocodiff_compile.ir.aten import ALL_TO_ALL, WAIT, aten, bound, size_bytes
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.lab.one_exchange import (
    FLAT,
    exchange_graph,
    exchanges_of,
    origins,
    split_only_exchange,
)
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.split_tapa_phases import SplitTapaPhases, split_exchanges
from cocodiff_compile.pipeline.run_passes import broken_rule
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.machine import Machine, sketch_machine
from cocodiff_compile.topology.phases import Phases, all_phases
from cocodiff_compile.topology.presets import aurora
from tests.support.captured import capture_call, captured_idiom, fake_ranks
from tests.support.code_text import text_only
from tests.support.decided import in_phases
from tests.support.hand_written import (
    DIFFUSERS,
    HEAD_FIRST,
    HEADS,
    STACKED,
    TRANSPOSED,
    WIDTH,
    Block,
    Layout,
)
from tests.support.idioms import IDIOMS
from tests.support.lockstep import (
    GRIDS,
    captured_model,
    equal_on_every_rank,
    machine,
    machine_groups,
    run_both,
)
from tests.support.traced import traced

every_grid = pytest.mark.parametrize("sizes", GRIDS.values(), ids=GRIDS)


# One exchange


@every_grid
def test_every_plan_moves_every_element_to_where_flat_does(sizes: Sequence[int]) -> None:
    on, num_ranks = machine(*sizes), math.prod(sizes)
    inputs, groups = origins(num_ranks), machine_groups(FLAT, on)
    flat = run_lockstep(exchange_graph(num_ranks), inputs, groups)
    for phases in all_phases(on.topology)[1:]:
        graph = exchange_graph(num_ranks)
        split_only_exchange(graph, on, phases)
        assert equal_on_every_rank(run_lockstep(graph, inputs, groups), flat), phases


def test_the_flat_exchange_of_the_proof_is_an_all_to_all() -> None:
    """Block r of rank s goes to place s of rank r: the yardstick itself, by its definition."""
    inputs = origins(6)
    flat = run_lockstep(exchange_graph(6), inputs, machine_groups(FLAT, machine(2, 3)))
    for rank, (result,) in enumerate(flat):
        sent = [inputs[peer][0][2 * rank : 2 * rank + 2] for peer in range(6)]
        assert torch.equal(result, torch.cat(sent))


def _swapped(on: Machine) -> Machine:
    """A machine that takes one axis for another of the same length."""
    tile, gpu = ("tile",), ("gpu",)
    return Machine(on.topology, {**on.groups, tile: on.groups[gpu], gpu: on.groups[tile]})


@pytest.mark.parametrize("phases", [(("tile",), ("gpu", "node")), (("tile",), ("gpu",), ("node",))])
def test_swapped_groups_are_caught(phases: Phases) -> None:
    on = machine(2, 2, 2)
    inputs, groups = origins(8), machine_groups(FLAT, on)
    flat = run_lockstep(exchange_graph(8), inputs, groups)
    graph = exchange_graph(8)
    split_only_exchange(graph, _swapped(on), phases)
    assert not equal_on_every_rank(run_lockstep(graph, inputs, groups), flat)


def _permutes(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=aten.permute.default)


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_dropped_layout_change_is_caught(dropped: int) -> None:
    on = machine(2, 2, 2)
    inputs, groups = origins(8), machine_groups(FLAT, on)
    flat = run_lockstep(exchange_graph(8), inputs, groups)
    graph = exchange_graph(8)
    split_only_exchange(graph, on, (("tile",), ("gpu", "node")))
    assert len(_permutes(graph)) == 2, "one before each phase; the last leaves ranks in order"
    permute = _permutes(graph)[dropped]
    permute.replace_all_uses_with(permute.all_input_nodes[0])
    assert not equal_on_every_rank(run_lockstep(graph, inputs, groups), flat)


@every_grid
def test_messages_and_bytes_per_axis_are_those_of_the_cost_model(sizes: Sequence[int]) -> None:
    """Counted from the collectives in the graph, against `traffic`, which plans are made with."""
    on, num_ranks = machine(*sizes), math.prod(sizes)
    for phases in all_phases(on.topology)[1:]:
        graph = exchange_graph(num_ranks)
        done = split_only_exchange(graph, on, phases)
        assert tuple(phase.axes for phase in done.phases) == phases
        total = 0
        for phase in done.phases:
            members = on.topology.ranks_along(0, phase.axes)
            splits = bound(phase.start)["input_split_sizes"]
            assert splits == [1] * len(members)
            block_bytes = size_bytes(phase.start) // len(members)
            assert size_bytes(phase.start) == num_ranks * 2 * 3 * 4
            flows = traffic(on.topology, phase.axes, size_bytes(phase.start))
            assert sum(flow.messages for flow in flows) == len(members) - 1
            assert sum(flow.size_bytes for flow in flows) == block_bytes * (len(members) - 1)
            total += len(members) - 1
        assert total * num_ranks == messages_per_exchange(on.topology, phases)


def test_96_ranks_send_what_the_paper_counts() -> None:
    topology = aurora(96)
    flat, tapa = (("tile", "gpu", "node"),), (("tile",), ("gpu", "node"))
    assert messages_per_exchange(topology, flat) == 9120
    assert messages_per_exchange(topology, tapa) == 4608


# Whole attentions


def split_all(gm: GraphModule, on: Machine) -> tuple[GraphModule, PassResult]:
    """A copy of the graph with every exchange in the cheapest phases that are not flat."""
    phased = GraphModule(gm, copy.deepcopy(gm.graph))
    recognition = recognize(phased.graph)
    (group,) = {item.group for site in recognition.sites for item in site.exchanges}
    result = in_phases({group: on}, "on")(phased.graph, recognition)
    phased.graph.lint()
    assert broken_rule(phased.graph) == ""
    return phased, result


@pytest.mark.parametrize("name", [idiom.name for idiom in IDIOMS])
def test_idiom_in_phases_is_flat_bit_for_bit(name: str) -> None:
    (idiom,) = (idiom for idiom in IDIOMS if idiom.name == name)
    twelve_heads = idiom.heads == idiom.kv_heads == HEADS
    sizes = (2, 3) if twelve_heads else (2, idiom.num_ranks // 2)
    gm, values = captured_idiom(name, math.prod(sizes))
    with fake_ranks(math.prod(sizes)):
        phased, result = split_all(gm, machine(*sizes))
    assert result.changed
    assert result.recognition is not None
    (site,) = result.recognition.sites
    assert all(len(item.phases) == 2 for item in site.exchanges)
    ours, flat = run_both(phased, gm, values, machine(*sizes))
    assert equal_on_every_rank(ours, flat)
    assert not torch.equal(flat[0][0], flat[1][0])


@pytest.mark.parametrize("grid", ["2x6", "2x6x2"])
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_whole_model_in_phases_is_flat_bit_for_bit(name: str, grid: str) -> None:
    on, num_ranks = machine(*GRIDS[grid]), math.prod(GRIDS[grid])
    with fake_ranks(num_ranks):
        gm, values, expected_sites = captured_model(name)
        phased, result = split_all(gm, on)
    assert result.recognition is not None
    assert len(result.recognition.sites) == expected_sites
    assert equal_on_every_rank(*run_both(phased, gm, values, on))


# The pass


def _block_graph(layout: Layout = DIFFUSERS) -> GraphModule:
    gm, _ = capture_call(Block(layout).eval(), torch.ones(1, 2, WIDTH))
    return gm


def _run(gm: GraphModule, on: Machine, tapa: Literal["auto", "on", "off"]) -> PassResult:
    return in_phases({"0": on}, tapa)(gm.graph, recognize(gm.graph))


def test_off_leaves_the_graph_to_the_letter() -> None:
    with fake_ranks(6):
        gm = _block_graph()
        before = str(gm.graph)
        found, on = recognize(gm.graph), {"0": machine(2, 3)}
        result = SplitTapaPhases(on, choose_phases(found, on, "off")).run(gm.graph, found)
    assert not result.changed
    assert str(gm.graph) == before
    assert result.notes == ("4 exchanges: flat",)


def test_a_second_run_changes_nothing() -> None:
    with fake_ranks(6):
        gm = _block_graph()
        first = _run(gm, machine(2, 3), "on")
        text = str(gm.graph)
        assert first.recognition is not None
        again = in_phases({"0": machine(2, 3)}, "on")(gm.graph, first.recognition)
    assert first.changed
    assert not again.changed
    assert str(gm.graph) == text


def test_auto_takes_flat_where_flat_is_cheapest() -> None:
    far = Link("far", 1e9, 2e9, latency_s=1.0)
    near = Link("near", 1e12, 2e12, latency_s=1e-9)
    with fake_ranks(6):
        for copies_per_s, expected in ((1e-3, False), (1e15, True)):
            topology = Topology("t", (Axis("a", 2, near), Axis("b", 3, far)), copies_per_s)
            assert _run(_block_graph(), sketch_machine(topology), "auto").changed is expected


def test_exchanges_in_flight_together_stay_so() -> None:
    """Three exchanges started one after the other: no wait stands before the third start, and all
    second phases start before one of them is waited for.
    """

    def three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        splits = [2] * 6
        c10d = torch.ops._c10d_functional
        started = [c10d.all_to_all_single(item, splits, splits, FLAT) for item in (x, y, z)]
        return [c10d.wait_tensor(item) for item in started]

    graph = traced(three, *(torch.zeros(12, 3) for _ in range(3)))
    plan = machine(2, 3), (("tile",), ("gpu",))
    split_exchanges(graph, [(item, *plan) for item in exchanges_of(graph)])
    graph.lint()
    order = [
        {ALL_TO_ALL: "start", WAIT: "wait"}[node.target]
        for node in graph.nodes
        if node.target in (ALL_TO_ALL, WAIT)
    ]
    assert order == ["start"] * 3 + ["wait", "start"] * 3 + ["wait"] * 3


def test_the_report_names_the_phases() -> None:
    with fake_ranks(4):
        options = {"topology": "aurora", "tapa": "on"}
        torch._dynamo.reset()
        explanation = explain(Block().eval(), torch.ones(1, 2, WIDTH), options=options)
    (site,) = json.loads(explanation.to_json())["graphs"][0]["sites"]
    way_in = [["tile"], ["gpu"]]
    assert [leg["phases"] for leg in site["legs"]] == [way_in, way_in, way_in, way_in[::-1]]
    assert "4 exchanges: tile | gpu" in str(explanation)


# What Inductor makes of it


def _num_kernels(options: dict[str, str], layout: Layout) -> tuple[int, int]:
    """Kernels and all-to-alls in the code that Inductor writes for one call."""
    torch._dynamo.reset()
    model = torch.compile(Block(layout).eval(), backend="cocodiff", options=options)
    with torch.no_grad(), text_only() as written:
        model(torch.ones(1, 2, WIDTH))
    (code,) = written
    called = code[code.index("def call(") :]
    return len(re.findall(r"\bcpp_fused\w*\(", called)), called.count("all_to_all_single.default(")


@pytest.mark.parametrize("layout", [DIFFUSERS, HEAD_FIRST, TRANSPOSED, STACKED])
def test_one_copy_more_per_extra_phase(layout: Layout, tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    link = {"bytes_per_s": 1e9, "latency_s": 1e-3}
    axes = [{"name": name, "size": 2, "link": "any"} for name in ("tile", "node")]
    grid = {"name": "grid", "copy_bytes_per_s": 1e12, "links": {"any": link}, "axes": axes}
    file.write_text(json.dumps(grid))
    with fake_ranks(4):
        kernels, exchanges = _num_kernels({"tapa": "off"}, layout)
        phased_kernels, phases = _num_kernels({"topology": str(file), "tapa": "on"}, layout)
    assert phases == 2 * exchanges
    assert phased_kernels <= kernels + exchanges
