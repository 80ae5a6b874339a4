# SPDX-License-Identifier: Apache-2.0
"""Tests on real gloo ranks that backend "cocodiff" computes what Inductor computes, bit for bit,
with every exchange in chunks of heads, of tokens, and in phases, and in the order of
schedule-v-first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

import cocodiff_compile
from cocodiff_compile.compiler import compile_graph
from cocodiff_compile.compiler.stages import Deciding
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.ir.aten import ALL_TO_ALL, WAIT
from cocodiff_compile.lab.bench.variants import ONLY_SHARED, SHARED
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.one_exchange import exchange_graph, origins, split_only_exchange
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.groups import make_machine
from cocodiff_compile.topology.files import load_topology
from cocodiff_compile.topology.phases import all_phases
from tests.support import hand_written
from tests.support.hand_written import WIDTH, Block

pytestmark = pytest.mark.gloo

CASES = [
    (4, "hand-written"),
    *(
        pytest.param(num_ranks, name, marks=pytest.mark.slow)
        for num_ranks, names in ((4, ("flux", "sd3", "qwen-image", "wan")), (8, ("flux", "sd3")))
        for name in names
    ),
]
AXES = {4: (2, 2), 8: (2, 2, 2)}
MASKED = ("qwen-image",)
INDUCTOR_ERROR = 1e-3
"""Inductor on CPU is up to 5e-4 away from eager by itself."""


def write_topology(file: Path, sizes: Sequence[int]) -> None:
    """A machine on which as many phases as axes are the cheapest."""
    axes = [{"name": f"axis{i}", "size": size, "link": "any"} for i, size in enumerate(sizes)]
    links = {"any": {"bytes_per_s": 1e12, "latency_s": 1e-3}}
    data = {"name": "grid", "copy_bytes_per_s": 1e12, "links": links, "axes": axes}
    file.write_text(json.dumps(data))


@dataclass(frozen=True)
class Case:
    """A model among ranks, what it is called with, and what one process makes of that."""

    model: Any
    inputs: dict[str, Any]
    expected: Tensor
    expected_sites: int
    sample: Callable[[Any], Tensor] = lambda result: result
    is_plain: bool = False
    """Whether the compiler has to share it out."""


def _public(name: str, heads: int) -> Case:
    small = SMALL_MODELS[name]
    model = small.build(num_layers=1, heads=heads)
    expected_sites = small.num_ulysses_attentions(model)
    inputs = small.inputs(
        model, batch=2, masked=name in MASKED, image_tokens=24 * heads, text_tokens=8 * heads
    )
    expected = small.sample(model(**inputs))
    return Case(model, inputs, expected, expected_sites, small.sample, is_plain=True)


def _hand_written(rank: int, num_ranks: int) -> Case:
    """A block with an MLP beside its attention; a rank is called with its own tokens."""
    torch.manual_seed(0)
    block = hand_written.WithMlp(heads=2 * num_ranks).eval()
    x = torch.randn(2, 8 * num_ranks, WIDTH)
    own, expected = (item.chunk(num_ranks, 1)[rank] for item in (x, block.reference(x)))
    return Case(block, {"x": own}, expected, 1)


def _run(rank: int, num_ranks: int, name: str, topology: str) -> dict[str, Any]:
    options: dict[str, Any] = {"topology": topology, "tapa": "on"}
    options |= {"head_chunks": 2, "token_chunks": 2}
    any_gain = functools.partial(Deciding, limits=Limits(order_gain=-1.0))  # models are small
    with (
        mock.patch.object(compile_graph, "Deciding", any_gain),
        torch.no_grad(),
        cocodiff_compile.collect_reports() as reports,
    ):
        is_own = name == "hand-written"
        case = _hand_written(rank, num_ranks) if is_own else _public(name, 2 * num_ranks)
        options |= SHARED if case.is_plain else {}
        how = {"backend": "cocodiff", "options": ONLY_SHARED} if case.is_plain else {}
        alone = torch.compile(case.model, fullgraph=True, **how)
        inductor = case.sample(alone(**case.inputs))
        reports.clear()
        torch._dynamo.reset()
        compiled = torch.compile(case.model, backend="cocodiff", fullgraph=True, options=options)
        ours = case.sample(compiled(**case.inputs))
    sites = [site for report in reports for site in report.summary["sites"]]
    return {
        "bit for bit": torch.equal(ours, inductor),
        "difference to eager": float((ours - case.expected).abs().max()),
        "phases": {len(leg["phases"]) for site in sites for leg in site["legs"]},
        "chunks": {leg["chunks"] for site in sites for leg in site["legs"]},
        "output exchanges": {site["legs"][-1]["chunks"] for site in sites},
        "ordered": all(report.report.is_ordered for report in reports),
        "sites": len(sites),
        "expected sites": case.expected_sites,
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_ranks_with_all_passes_equal_inductor_and_one_process(
    num_ranks: int, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "grid.json"
    write_topology(file, AXES[num_ranks])
    for result in run_local_ranks(_run, num_ranks, name, str(file), timeout_s=800):
        assert result["bit for bit"]
        assert result["difference to eager"] <= INDUCTOR_ERROR
        assert result["sites"] == result["expected sites"] > 0
        assert result["phases"] == {len(AXES[num_ranks])}
        assert result["chunks"] <= {2, 4}  # of heads, and of tokens where those came in chunks
        assert result["output exchanges"] == {4}
        assert result["ordered"]


def _every_plan(rank: int, num_ranks: int, file: str) -> dict[str, bool]:
    """Each plan alone, with values that name their origin, against the flat exchange."""
    topology = load_topology(Path(file))
    machine = make_machine(tuple(range(num_ranks)), topology)
    (x,) = origins(num_ranks)[rank]
    splits = [2] * num_ranks
    flat = WAIT(ALL_TO_ALL(x, splits, splits, dist.group.WORLD.group_name))
    equal = {}
    for phases in all_phases(topology)[1:]:
        graph = exchange_graph(num_ranks)
        split_only_exchange(graph, machine, phases)
        ours = GraphModule(nn.Module(), graph)(x)
        equal[str(phases)] = torch.equal(ours, flat)
    return equal


@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_plan_over_real_messages(num_ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    write_topology(file, AXES[num_ranks])
    for equal in run_local_ranks(_every_plan, num_ranks, str(file), timeout_s=300):
        assert len(equal) == {4: 2, 8: 12}[num_ranks]
        assert all(equal.values()), equal


def _two_kinds_of_rank(rank: int, _num_ranks: int) -> int:
    """Ranks 0 and 1 compile a Ulysses attention over their half, ranks 2 and 3 something else."""
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ulysses")).get_group("ulysses")
    hand_written.group = lambda: half
    model, x = (Block().eval(), torch.ones(1, 2, WIDTH)) if rank < 2 else (nn.ReLU(), torch.ones(4))
    with torch.no_grad(), cocodiff_compile.collect_reports() as reports:
        torch.compile(model, backend="cocodiff_eager", fullgraph=True)(x)
    dist.barrier()
    return sum(len(report.summary["sites"]) for report in reports)


def test_a_rank_without_any_site_holds_nobody_up() -> None:
    assert run_local_ranks(_two_kinds_of_rank, 4, timeout_s=300) == [1, 1, 0, 0]
