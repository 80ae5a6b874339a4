# SPDX-License-Identifier: Apache-2.0
"""Tests FLUX with quantised weights and an unmerged LoRA on real gloo ranks, through every pass."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph

import cocodiff_compile
from cocodiff_compile.compiler import compile_graph, finish_graph
from cocodiff_compile.compiler.generated_order import graph_kinds, keeps_order
from cocodiff_compile.compiler.stages import Deciding
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.lab.bench.variants import ONLY_SHARED, SHARED
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from tests.ranks.test_compiled_ranks import AXES, INDUCTOR_ERROR, write_topology

pytestmark = pytest.mark.gloo

NUM_RANKS = 4
ADAPTED = ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj"]


def _adapted(heads: int) -> tuple[Any, dict[str, Any]]:
    from peft import LoraConfig  # noqa: PLC0415  (slow, and not needed by `make test`)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415

    small = SMALL_MODELS["flux"]
    model = small.build(num_layers=1, heads=heads)
    inputs = small.inputs(model, image_tokens=24 * heads, text_tokens=8 * heads)
    quantize_(model, Int8WeightOnlyConfig())
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=ADAPTED)
    model.add_adapter(lora)
    return model, inputs


def _run(_rank: int, num_ranks: int, topology: str) -> dict[str, Any]:
    small = SMALL_MODELS["flux"]
    model, inputs = _adapted(2 * num_ranks)
    options: dict[str, Any] = {**SHARED, "topology": topology, "tapa": "on"}
    options |= {"head_chunks": 2, "token_chunks": 2}
    # Models are small: little to gain, and dequantised weights take much of the memory.
    any_gain = functools.partial(Deciding, limits=Limits(order_gain=-1.0, order_memory=2.0))
    kinds: list[list[str]] = []

    def noted_kinds(graph: Graph) -> list[str]:
        kinds.append(graph_kinds(graph))
        return kinds[-1]

    with (
        mock.patch.object(compile_graph, "Deciding", any_gain),
        mock.patch.object(finish_graph, "graph_kinds", noted_kinds),
        torch.no_grad(),
        cocodiff_compile.collect_reports() as reports,
    ):
        eager = small.sample(model(**inputs))
        alone = torch.compile(model, backend="cocodiff", fullgraph=True, options=ONLY_SHARED)
        inductor = small.sample(alone(**inputs))
        reports.clear()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="cocodiff", fullgraph=True, options=options)
        result, (code,) = run_and_get_code(lambda: compiled(**inputs))
    (report,) = reports
    legs = [leg for site in report.summary["sites"] for leg in site["legs"]]
    sites = report.report.recognition.sites
    return {
        "bit for bit": torch.equal(small.sample(result), inductor),
        "difference to eager": float((small.sample(result) - eager).abs().max()),
        "chunks": {leg["chunks"] for leg in legs},
        "phases": {len(leg["phases"]) for leg in legs},
        "projections": [leg["projections"] for leg in legs],
        "V first": all(
            site.v.exchange.pieces[0].start < min(item.node for item in site.q.projections)
            for site in sites
        ),
        "order is kept": keeps_order(code, kinds[-1]),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quantised_flux_with_a_lora_equals_inductor(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    write_topology(file, AXES[NUM_RANKS])
    for result in run_local_ranks(_run, NUM_RANKS, str(file), timeout_s=800):
        assert result["bit for bit"]
        assert result["difference to eager"] <= INDUCTOR_ERROR
        assert result["chunks"] <= {2, 4}
        assert result["phases"] == {2}
        assert result["V first"] and result["order is kept"]
        assert all(result["projections"])


def _scaled(_rank: int, _num_ranks: int) -> list[float]:
    """Returns how far a compiled model is from one process after each change of its LoRA: scaled,
    disabled, enabled and scaled again.
    """
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415

    small = SMALL_MODELS["flux"]
    model, inputs = _adapted(4)
    plain, _ = _adapted(4)
    options: dict[str, Any] = {**SHARED, "v_first": False}
    compiled = torch.compile(model, backend="cocodiff", options=options)

    def both(change: Any) -> None:
        change(model)
        change(plain)

    def scale(factor: float) -> Any:
        def change(changed: Any) -> None:
            for layer in changed.modules():
                if isinstance(layer, LoraLayer):
                    layer.set_scale("default", factor)

        return change

    changes = (
        lambda _: None,
        scale(0.25),
        lambda changed: changed.disable_lora(),
        lambda changed: changed.enable_lora(),
        scale(2.0),
    )
    found = []
    with torch.no_grad():
        for change in changes:
            both(change)
            ours, expected = small.sample(compiled(**inputs)), small.sample(plain(**inputs))
            found.append(float((ours - expected).abs().max()))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lora_is_scaled_and_disabled_between_calls() -> None:
    for distances in run_local_ranks(_scaled, 2, timeout_s=800):
        assert max(distances) <= INDUCTOR_ERROR
