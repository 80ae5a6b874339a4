# SPDX-License-Identifier: Apache-2.0
"""split-projections: one GEMM per role instead of one for all, without a copy of the weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from torch.fx import GraphModule, Node

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.aten import PROJECTION, aten, is_alias
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.split_projections import (
    fused_projections,
    split_projections,
)
from cocodiff_compile.pipeline.run_passes import broken_rule
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.machine import sketch_machine
from tests.support.captured import capture_call, fake_ranks
from tests.support.decided import unfused
from tests.support.idioms import IDIOMS
from tests.support.lockstep import captured_model, equal_on_every_rank, machine, run_both

FUSED = [idiom for idiom in IDIOMS if "fused" in idiom.name]


def test_a_public_model_with_projections_apart_is_captured_bit_for_bit() -> None:
    with fake_ranks(6):
        gm, values, _ = captured_model("flux2")
        apart = GraphModule(gm, copy.deepcopy(gm.graph))
        recognition = recognize(apart.graph)
        (fused,) = {
            item.node for site in recognition.sites for item in site.v.projections if item.is_fused
        }
        assert split_projections(apart.graph, recognition) == 1
        apart.graph.eliminate_dead_code()
        apart.graph.lint()
        assert broken_rule(apart.graph) == ""
        sites = recognize(apart.graph).sites
    assert len(sites) == len(recognition.sites)
    assert fused not in set(apart.graph.nodes)
    single = sites[-1]
    nodes = [item.node for leg in (single.q, single.k, single.v) for item in leg.projections]
    assert len(set(nodes)) == 3
    assert not any(item.is_fused for leg in single.legs[:3] for item in leg.projections)
    assert equal_on_every_rank(*run_both(apart, gm, values, machine(2, 3)))


@pytest.mark.parametrize("idiom", FUSED, ids=str)
def test_fused_idioms_keep_their_values(idiom) -> None:  # type: ignore[no-untyped-def]
    idiom = replace(idiom, num_ranks=6)
    with fake_ranks(6):
        gm, values = capture_call(idiom.model(), *idiom.arguments(), dynamic=idiom.dynamic)
        apart = GraphModule(gm, copy.deepcopy(gm.graph))
        recognition = recognize(apart.graph)
        before = str(apart.graph)
        number = split_projections(apart.graph, recognition)
        assert number <= len(fused_projections(recognition))
        assert number > 0 or str(apart.graph) == before
        apart.graph.eliminate_dead_code()
        assert broken_rule(apart.graph) == ""
        assert len(recognize(apart.graph).sites) == len(recognition.sites)
    assert equal_on_every_rank(*run_both(apart, gm, values, machine(2, 3)))


def _weights(gemm: Node) -> Node:
    """Returns the weights that a GEMM multiplies with, behind their views."""
    node = gemm.all_input_nodes[-1]
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node


def test_weights_are_seen_in_parts_not_copied() -> None:
    with fake_ranks(6):
        gm, *_ = captured_model("flux2")
        recognition = recognize(gm.graph)
        (fused,) = fused_projections(recognition)
        weight = _weights(fused)
        split_projections(gm.graph, recognition)
        gm.graph.eliminate_dead_code()
    gemms = [
        node for node in gm.graph.nodes if node.target in PROJECTION and _weights(node) is weight
    ]
    assert len(gemms) == 4  # V, Q, K, and the MLP's two halves together
    assert weight.op == "placeholder"
    assert sum(node.meta["val"].shape[-1] for node in gemms) == fused.meta["val"].shape[-1]


def _costs(bytes_per_s: float) -> Costs:
    link = Link("wire", bytes_per_s, 2 * bytes_per_s, 1e-9)
    topology = Topology("two", (Axis("tile", 2, link), Axis("node", 3, link)), 1e12)
    device = Device("some", 1e10, 1e10, 1.0, 1.0, 1.0, 1e-7)
    return Costs(device, {"0": sketch_machine(topology)}, "off")


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(1e8, True), (1e15, False)])
def test_projections_are_split_where_an_early_start_pays(
    bytes_per_s: float, expected: bool
) -> None:
    with fake_ranks(6):
        gm, *_ = captured_model("flux2")
        before = str(gm.graph)
        result = unfused(_costs(bytes_per_s))(gm.graph, recognize(gm.graph))
    assert result.changed is expected
    assert (str(gm.graph) != before) is expected


def test_a_model_without_fused_projections_is_left_to_the_letter() -> None:
    with fake_ranks(2):
        gm, *_ = captured_model("flux")
        before = str(gm.graph)
        result = unfused(_costs(1e6))(gm.graph, recognize(gm.graph))
    assert not result.changed
    assert str(gm.graph) == before
    assert aten.addmm.default in {node.target for node in gm.graph.nodes}
