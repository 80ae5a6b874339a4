# SPDX-License-Identifier: Apache-2.0
"""Changes to a plain model after it was compiled and shared out: real ranks stay right."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading, apply_layer_skip, apply_layerwise_casting
from diffusers.hooks.layer_skip import LayerSkipConfig
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from torch import nn

from cocodiff_compile.lab.bench.variants import SHARED
from cocodiff_compile.lab.distances import largest
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.report.collect import collect_reports

pytestmark = pytest.mark.gloo

Change = Callable[[Any], None]
QUICKLY = {**SHARED, "v_first": False, "tapa": "off", "head_chunks": 1, "token_chunks": 1}


def _set_attn_processor(model: Any) -> None:
    model.set_attn_processor(FluxAttnProcessor())


def _set_joint_processors(model: Any) -> None:
    model.set_attn_processor(JointAttnProcessor2_0())


class _Halved(FluxAttnProcessor):  # type: ignore[misc]
    """A processor that nobody has seen before."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        return tuple(item / 2 for item in results) if isinstance(results, tuple) else results / 2


def _set_unknown_processor(model: Any) -> None:
    model.transformer_blocks[0].attn.set_processor(_Halved())


def _set_ip_adapters(model: Any) -> None:
    torch.manual_seed(7)
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(64, 32, num_tokens=(3,)).eval())


def _fuse(model: Any) -> None:
    with torch.no_grad():
        model.fuse_qkv_projections()


class _LowRank(nn.Module):
    """A linear layer with a low-rank addition, as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base_layer(x) + self.up(self.down(x))
        return added


def _wrap_linears(model: Any) -> None:
    torch.manual_seed(7)
    model.proj_out = _LowRank(model.proj_out)
    model.context_embedder = _LowRank(model.context_embedder)
    for block in model.transformer_blocks:
        block.attn.to_q = _LowRank(block.attn.to_q)


def _replace_the_first_block(model: Any) -> None:
    other: Any = SMALL_MODELS["qwen-image"].build(num_layers=1, seed=9)
    model.transformer_blocks[0] = other.transformer_blocks[0]


def _add_a_block(model: Any) -> None:
    other: Any = SMALL_MODELS["qwen-image"].build(num_layers=1, seed=9)
    model.transformer_blocks.append(other.transformer_blocks[0])


def _load_state_dict(model: Any) -> None:
    model.load_state_dict(SMALL_MODELS["flux"].build(num_layers=1, seed=9).state_dict())


def _set_attention_backend(model: Any) -> None:
    model.set_attention_backend("_native_math")


def _skip_a_layer(model: Any) -> None:
    apply_layer_skip(model, LayerSkipConfig([0], fqn="blocks"))


def offload_by_model(model: Any) -> None:
    """Does what a pipeline does after each call once `enable_model_cpu_offload` was called."""
    remove_hook_from_module(model, recurse=True)
    accelerate.cpu_offload_with_hook(model, "cpu")


def _offload_by_layer(model: Any) -> None:
    remove_hook_from_module(model, recurse=True)
    accelerate.cpu_offload(model, "cpu")


def offload_by_group(model: Any) -> None:
    apply_group_offloading(
        model,
        onload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )


def _cast_layerwise(model: Any) -> None:
    apply_layerwise_casting(model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """`more` are inputs that the changed model is called with."""

    name: str
    change: Change
    num_layers: int = 1
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.change.__name__.strip('_')}"


_IP_TOKENS = {"joint_attention_kwargs": {"ip_hidden_states": [torch.ones(2, 1, 3, 32) / 3]}}

QUICK = [Case("sd3", _fuse), Case("sd3", _wrap_linears), Case("sd3", offload_by_model)]
MORE = [
    Case("flux", _set_attn_processor),
    Case("flux", _set_unknown_processor),
    Case("flux", _fuse),
    Case("flux", _set_ip_adapters, more=_IP_TOKENS),
    Case("flux", _load_state_dict),
    Case("flux", _set_attention_backend),
    Case("flux", _offload_by_layer),
    Case("flux", offload_by_group),
    Case("flux", _cast_layerwise),
    Case("sd3", _set_joint_processors),
    Case("qwen-image", _replace_the_first_block),
    Case("qwen-image", _add_a_block),
    Case("wan", _skip_a_layer, num_layers=2),
]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _run(case: Case) -> dict[str, Any]:
    small = SMALL_MODELS[case.name]
    single: Any = small.build(num_layers=case.num_layers)
    model: Any = small.build(num_layers=case.num_layers)
    inputs = small.inputs(model, batch=2, image_tokens=15, text_tokens=6)
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        before = small.sample(single(**inputs))
        case.change(single)
        after = small.sample(single(**inputs, **case.more))
        compiled = torch.compile(model, backend="cocodiff_eager", dynamic=False, options=QUICKLY)
        errors = [_error(small.sample(compiled(**inputs)), before)]
        reports.clear()
        case.change(model)
        for _ in range(2):
            errors.append(_error(small.sample(compiled(**inputs, **case.more)), after))
    sites = sum(len(item.report.recognition.sites) for item in reports)
    return {"errors": errors, "sites": sites, "graphs": len(reports)}


def _run_all(_rank: int, _num_ranks: int, which: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in QUICK if which == "quick" else MORE:
        try:
            results[str(case)] = _run(case)
        except Exception:
            # The same on every rank, or the timeout ends it.
            results[str(case)] = traceback.format_exc()
    return results


@pytest.mark.parametrize("which", ["quick", pytest.param("more", marks=pytest.mark.slow)])
def test_a_changed_model_computes_what_one_process_computes(which: str) -> None:
    for results in run_local_ranks(_run_all, 2, which, timeout_s=500):
        failed = [f"{name}: {found}" for name, found in results.items() if not _is_right(found)]
        assert not failed, "\n".join(failed)


def _is_right(found: Any) -> bool:
    return isinstance(found, dict) and largest(found["errors"]) < 1e-5
