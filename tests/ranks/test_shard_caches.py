# SPDX-License-Identifier: Apache-2.0
"""diffusers' caches on a plain model that is shared out: all ranks skip what one process skips."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

from cocodiff_compile.lab.distances import largest_error
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.report.collect import collect_reports
from tests.ranks.test_shard_changed_models import QUICKLY

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

CHANGES = [0.0, 0.05, 0.6, 0.02, 1.5]
"""How much the latents change from step to step."""
TOKENS = {"image_tokens": 15, "text_tokens": 6}

_timestep = [0]
"""Timestep of the step that is under way, for caches that ask for it."""


def _first_block() -> Any:
    return FirstBlockCacheConfig(0.1)


def _taylor() -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    )


def _mag() -> Any:
    ratios = [1.0, 1.02, 1.0, 1.02, 1.0]
    return MagCacheConfig(threshold=0.2, num_inference_steps=len(CHANGES), mag_ratios=ratios)


def _pyramid() -> Any:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: _timestep[0],
    )


def _faster() -> Any:
    return FasterCacheConfig(
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: _timestep[0],
        is_guidance_distilled=True,
    )


def _whole(model: Any) -> Any:
    return torch.compile(model, backend="cocodiff_eager", dynamic=False, options=QUICKLY)


def _by_blocks(model: Any) -> Any:
    model.compile_repeated_blocks(backend="cocodiff_eager", dynamic=False, options=QUICKLY)
    return model


CASES: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
    ("flux", _first_block, _whole),
    ("flux", _first_block, _by_blocks),
    ("wan", _first_block, _whole),
    ("flux", _taylor, _whole),
    ("flux", _taylor, _by_blocks),
    ("qwen-image", _mag, _whole),
    ("flux", _pyramid, _whole),
    ("flux", _faster, _whole),
]


def _id(case: Any) -> str:
    name, config, compile_model = case
    return f"{name}{config.__name__}{compile_model.__name__}"


def _steps(name: str, model: Any, call: Any) -> list[torch.Tensor]:
    """Returns what the model predicts in each step of a denoising."""
    small = SMALL_MODELS[name]
    inputs = small.inputs(model, **TOKENS)
    latents, noise = small.latents(inputs), torch.Generator().manual_seed(3)
    predictions = []
    for step, change in enumerate(CHANGES):
        _timestep[0] = 790 - 50 * step
        latents = latents + change * torch.randn(latents.shape, generator=noise)
        with torch.no_grad(), model.cache_context("cond"):
            predictions.append(small.sample(call(**{**inputs, small.latent_key: latents})))
    return predictions


def _run(case: Any) -> dict[str, Any]:
    name, config, compile_model = case
    single: Any = SMALL_MODELS[name].build()
    exact = _steps(name, single, single)
    single.enable_cache(config())
    cached = _steps(name, single, single)
    model: Any = SMALL_MODELS[name].build()
    model.enable_cache(config())
    torch._dynamo.reset()
    with collect_reports() as reports:
        found = _steps(name, model, compile_model(model))
    return {
        "to one process": largest_error(found, cached),
        "to no cache": largest_error(cached, exact),
        "sites": sum(len(item.report.recognition.sites) for item in reports),
        "graphs": len(reports),
    }


def _run_all(_rank: int, _num_ranks: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in CASES:
        try:
            results[_id(case)] = _run(case)
        except Exception:
            # The same on every rank, or the timeout ends it.
            results[_id(case)] = traceback.format_exc()
    return results


@pytest.mark.timeout(900)
def test_ranks_skip_what_one_process_skips() -> None:
    for results in run_local_ranks(_run_all, 2, timeout_s=800):
        failed = [f"{name}: {item}" for name, item in results.items() if not _is_right(name, item)]
        assert not failed, "\n".join(failed)


def _is_right(name: str, found: Any) -> bool:
    """Returns whether ranks equal one process, tokens were shared out, and something skipped. The
    hooks of MagCache hide the blocks from Dynamo: every rank computes all of them.
    """
    if not isinstance(found, dict):
        return False
    is_shared = found["sites"] > 0 or "_mag" in name
    return bool(found["to one process"] < 1e-5 and found["to no cache"] > 1e-3 and is_shared)
