# SPDX-License-Identifier: Apache-2.0
"""Graphs captured for devices that are not there: fake `xpu` and `cuda` tensors.

Every pass finds and does on them what it does on CPU. Structure only: no kernel of such a device
ran, and no exchange.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.backends.eager import run_as_it_stands
from cocodiff_compile.compat import FakeTensorMode
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.generated_order import graph_kinds
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.ir.aten import bound, shape_of, value_of
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.collectives import collectives_by_group
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.passes import PASS_NAMES
from cocodiff_compile.report.collect import GraphReport, collect_reports
from tests.support.absent_devices import load_stand_in
from tests.support.captured import fake_ranks
from tests.support.hand_written import WIDTH, Block

NUM_RANKS = 4
EVERYTHING: dict[str, Any] = {
    "shard": {"min_gain": 0},
    "tapa": "on",
    "head_chunks": 2,
    "token_chunks": 2,
    "v_major": {"policy": "fixed", "only_if_faster": False},
}
LAYERS = {"flux": 1, "wan": 2}
"""Number of layers of each kind: two attentions in a row."""


@dataclass(frozen=True)
class Rewritten:
    """A model behind all passes, and what is said of it."""

    graph: Graph
    report: GraphReport
    inductor_overlaps: bool
    """Whether Inductor would have ordered collectives by its own estimates, when asked to."""

    def sites(self) -> list[dict[str, Any]]:
        """Returns the sites without their attention op, which differs between devices."""
        sites = json.loads(json.dumps(self.report.summary["sites"]))
        for site in sites:
            del site["attention"]["op"], site["attention"]["node"]
        return list(sites)

    def collectives(self) -> list[tuple[Any, ...]]:
        """Returns what every collective sends and how: by group, in order."""
        return [
            (node.target, group, *shape_of(sent), value_of(sent).dtype, _numbers(node))
            for group, nodes in collectives_by_group(self.graph).items()
            for node in nodes
            for sent in node.all_input_nodes
        ]

    def attentions(self) -> set[str]:
        return {str(node.target) for node in self.graph.nodes if is_attention(node.target)}

    def devices(self) -> set[str]:
        return {
            value_of(node).device.type
            for node in self.graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
        }


def _numbers(node: Node) -> dict[str, Any]:
    return {name: value for name, value in bound(node).items() if not isinstance(value, Node)}


def _slow_grid(file: Path) -> str:
    """2 tiles x 2 nodes, over links that make exchanges worth hiding."""
    wire = {"bytes_per_s": 2e7, "latency_s": 1e-6}
    axes = [{"name": name, "size": 2, "link": "wire"} for name in ("tile", "node")]
    data = {"name": "slow", "copy_bytes_per_s": 1e10, "links": {"wire": wire}, "axes": axes}
    file.write_text(json.dumps(data))
    return str(file)


def behind_passes(
    model: nn.Module, inputs: dict[str, Any], mode: FakeTensorMode, options: dict[str, Any]
) -> Rewritten:
    """Returns `model` behind all passes, which decide by the costs of a CPU for every device."""
    kept: list[tuple[Graph, bool]] = []
    overlap = "aten_distributed_optimizations.enable_overlap_scheduling"

    def keep(gm: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        told = torch._inductor.config.aten_distributed_optimizations
        kept.append((gm.graph, told.enable_overlap_scheduling))
        return run_as_it_stands(gm, example_inputs, **more)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, example_inputs, config, keep, dry_run=True, device=CPU.guess)

    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        topology = _slow_grid(Path(folder) / "slow.json")
        config = CompileConfig.from_options({"topology": topology, **options})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    # Constants would be computed, on a device that is not there.
    settings = {overlap: True, "joint_graph_constant_folding": False}
    with mode, collect_reports() as reports, torch._inductor.config.patch(settings):
        compiled(**inputs)
    (report,), (graph, told) = reports, kept[0]
    return Rewritten(graph, report, told)


@functools.cache
def rewritten(name: str, kind: str) -> Rewritten:
    """A public model, with everything asked for."""
    load_stand_in(kind)
    small, mode = SMALL_MODELS[name], FakeTensorMode(allow_non_fake_inputs=True)
    with fake_ranks(NUM_RANKS), torch.no_grad():
        with mode, torch.device(kind):
            model = small.build(num_layers=LAYERS[name], heads=8, head_size=32)
            inputs = small.inputs(model, image_tokens=128, text_tokens=16)
        return behind_passes(model, inputs, mode, EVERYTHING)


CUDA = pytest.param("cuda", marks=pytest.mark.slow)


def each(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrizes a test by both models and both absent devices; most runs take one pair only."""
    by_kind = pytest.mark.parametrize("kind", ["xpu", CUDA])(test)
    names = [pytest.param(name, marks=pytest.mark.slow) for name in LAYERS if name != "flux"]
    return pytest.mark.parametrize("name", ["flux", *names])(by_kind)


@each
def test_the_same_sites_are_found(name: str, kind: str) -> None:
    recognition, on_cpu = rewritten(name, kind), rewritten(name, "cpu")
    assert recognition.devices() == {kind}
    assert on_cpu.devices() == {"cpu"}
    assert recognition.sites() == on_cpu.sites()
    assert len(recognition.sites()) == 2
    assert recognition.report.summary["declined"] == on_cpu.report.summary["declined"] == []


@each
def test_the_same_collectives_are_sent_in_the_same_order(name: str, kind: str) -> None:
    found, on_cpu = rewritten(name, kind), rewritten(name, "cpu")
    assert found.collectives() == on_cpu.collectives()
    assert graph_kinds(found.graph) == graph_kinds(on_cpu.graph)


@each
def test_every_pass_does_the_same(name: str, kind: str) -> None:
    def did(item: Rewritten) -> dict[str, tuple[bool, tuple[str, ...]]]:
        passes = item.report.report.passes
        return {record.name: (record.result.changed, record.result.notes) for record in passes}

    found = did(rewritten(name, kind))
    assert found == did(rewritten(name, "cpu"))
    assert set(found) == {*PASS_NAMES}
    idle = {pass_name for pass_name, (is_changed, _) in found.items() if not is_changed}
    assert idle <= {"recognize-ulysses", "split-projections"}, "these have nothing to change"


@pytest.mark.parametrize("kind", ["cpu", "xpu", CUDA])
def test_each_device_has_its_own_attention(kind: str) -> None:
    op = {
        "cpu": "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "xpu": "aten._scaled_dot_product_fused_attention_overrideable.default",
        "cuda": "aten._scaled_dot_product_efficient_attention.default",
    }
    assert rewritten("flux", kind).attentions() == {op[kind]}


@pytest.mark.parametrize("kind", ["cpu", "xpu", CUDA])
def test_inductors_own_overlap_is_off_on_xpu_whose_links_it_does_not_know(kind: str) -> None:
    assert rewritten("flux", kind).inductor_overlaps == (kind != "xpu")


@pytest.mark.parametrize(
    ("kind", "setting", "is_ordered"),
    [
        ("xpu", "CCL_OP_SYNC", False),
        ("xpu", "CUDA_LAUNCH_BLOCKING", True),
        ("cuda", "CUDA_LAUNCH_BLOCKING", False),
        ("cpu", "CCL_OP_SYNC", True),
    ],
)
def test_a_setting_that_defeats_overlap_on_a_device_leaves_its_order(
    kind: str, setting: str, is_ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, "1")
    load_stand_in(kind)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_ranks(NUM_RANKS), torch.no_grad():
        with mode, torch.device(kind):
            model, inputs = Block().eval(), {"x": torch.ones(1, 64, WIDTH)}
        found = behind_passes(model, inputs, mode, {"head_chunks": 1})
    assert found.report.report.is_ordered == is_ordered
