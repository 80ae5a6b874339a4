"""diffusers' caches on a parallelised model: all ranks skip what one process skips."""

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
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks.mag_cache import MagCacheBlockHook
from torch.utils import _pytree as pytree

from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize
from tests.support.captured import fake_ranks
from tests.support.live_mesh import parallelize_live

NUM_RANKS = 2
# How much the first half of the latents changes from step to step: the first rank sees all of it,
# the second only what attention brings over.
CHANGES = [0.0, 0.05, 0.6, 0.02, 1.5, 0.3]

Config = Callable[[], Any]

_timestep = [0]
"""Timestep of the step that is under way, for caches that ask for it."""


def _first_block() -> Any:
    return FirstBlockCacheConfig(0.1)


def _taylor() -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    )


def _taylor_lite() -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=True,
    )


def _mag() -> Any:
    steps = len(CHANGES)
    return MagCacheConfig(
        threshold=0.2, num_inference_steps=steps, mag_ratios=[1.0, 1.02] * (steps // 2)
    )


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


def _sea() -> Any:
    return SeaCacheConfig(threshold=0.5)


# Image and text tokens; those that do not divide have rows of zeros among the first block's.
EVEN, UNEVEN = (48, 24), (45, 23)
CASES: list[tuple[str, Config, tuple[int, int]]] = [
    ("flux", _first_block, EVEN),
    ("flux", _first_block, UNEVEN),
    ("ltx", _first_block, UNEVEN),
    ("qwen-image", _first_block, EVEN),
    ("wan", _first_block, UNEVEN),
    ("flux", _taylor, EVEN),
    ("flux", _taylor_lite, EVEN),
    ("qwen-image", _taylor, UNEVEN),
    ("flux", _mag, UNEVEN),
    ("qwen-image", _mag, EVEN),
    ("flux", _pyramid, EVEN),
    ("flux", _faster, EVEN),
    ("wan", _sea, UNEVEN),
]


def _id(case: Any) -> str:
    name, config, tokens = case
    return f"{name}{config.__name__}-{'even' if tokens == EVEN else 'uneven'}"


def _steps(model: Any, name: str, tokens: tuple[int, int]) -> list[torch.Tensor]:
    """Returns what the model predicts in each step of a denoising."""
    small = SMALL_MODELS[name]
    inputs = small.inputs(model, image_tokens=tokens[0], text_tokens=tokens[1])
    latents, noise = small.latents(inputs), torch.Generator().manual_seed(3)
    half = latents.reshape(-1).shape[0] // 2
    predictions = []
    for step, change in enumerate(CHANGES):
        moved = change * torch.randn(latents.shape, generator=noise).reshape(-1)
        moved[half:] = 0
        _timestep[0] = 790 - 50 * step
        latents = latents + moved.reshape(latents.shape)
        called = {**inputs, small.latent_key: latents}
        place = {"step_index": step, "num_inference_steps": len(CHANGES), "sigma": 1 - step / 10}
        with torch.no_grad(), model.cache_context("cond", **place):
            predictions.append(small.sample(model(**called)))
    return predictions


def _distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def _run(case: Any) -> dict[str, float]:
    name, config, tokens = case
    small = SMALL_MODELS[name]
    single: Any = small.build()
    exact = _steps(single, name, tokens)
    single.enable_cache(config())
    cached = _steps(single, name, tokens)
    before: Any = small.build()
    before.enable_cache(config())
    parallelize_live(before)
    after: Any = parallelize_live(small.build())
    with torch.no_grad():
        after(**small.inputs(after))  # so that nothing is done for the first time
    after.enable_cache(config())
    return {
        "before": _distance(_steps(before, name, tokens), cached),
        "after": _distance(_steps(after, name, tokens), cached),
        "to no cache": _distance(cached, exact),
    }


def _switched_again() -> float:
    """A cache that is disabled and enabled again is as common as the first one."""
    small = SMALL_MODELS["flux"]
    single: Any = small.build()
    single.enable_cache(_first_block())
    cached = _steps(single, "flux", EVEN)
    model: Any = parallelize_live(small.build())
    model.enable_cache(_first_block())
    _steps(model, "flux", EVEN)
    model.disable_cache()
    model.enable_cache(_first_block())
    return _distance(_steps(model, "flux", EVEN), cached)


def _calibrated() -> list[list[float]]:
    """The ratios that MagCache measures, on one process and on this rank."""
    ratios = []
    for is_parallel in (False, True):
        model: Any = SMALL_MODELS["flux"].build()
        if is_parallel:
            parallelize_live(model)
        # One step more than is taken: the last one prints the ratios and forgets them.
        model.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=len(CHANGES) + 1))
        _steps(model, "flux", UNEVEN)
        hooks = model.single_transformer_blocks[-1]._diffusers_hook.hooks.values()
        (tail,) = [hook for hook in hooks if isinstance(hook, MagCacheBlockHook)]
        ratios.append(tail.state_manager._state_cache["cond"].calibration_ratios)
    return ratios


def _run_all(_rank: int, _num_ranks: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in CASES:
        try:
            results[_id(case)] = _run(case)
        except Exception:
            # The same on every rank, or the timeout ends it.
            results[_id(case)] = traceback.format_exc()
    results["switched again"] = _switched_again()
    results["calibrated"] = _calibrated()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local_ranks(_run_all, NUM_RANKS, timeout_s=120)


@pytest.mark.gloo
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_ranks_skip_what_one_process_skips(
    ranks: list[dict[str, Any]], case: Any, order: str
) -> None:
    for results in ranks:
        result = results[_id(case)]
        assert isinstance(result, dict), result
        assert result[order] < 1e-5
        assert result["to no cache"] > 1e-3, "else nothing was skipped"


@pytest.mark.gloo
def test_a_cache_enabled_again_decides_for_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert all(results["switched again"] < 1e-5 for results in ranks)


@pytest.mark.gloo
def test_ratios_are_measured_over_all_real_tokens(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        single, parallel = results["calibrated"]
        assert len(single) == len(CHANGES)
        assert max(abs(ratio - 1) for ratio in single) > 1e-3, "else anything would do"
        assert parallel == pytest.approx(single, abs=1e-5)


def test_a_cache_that_would_read_a_share_is_refused() -> None:
    """SeaCache with a callback of one's own, on a model whose inputs are split."""
    small = SMALL_MODELS["flux"]

    def vision(_model: Any, _args: Any, kwargs: Any) -> list[torch.Tensor]:
        return [kwargs["hidden_states"].reshape(4, -1, 1, 1)]

    with fake_ranks(NUM_RANKS, rank=0):
        model: Any = parallelize(small.build(num_layers=1))
        model.enable_cache(SeaCacheConfig(raw_vision_callback=vision))
        inputs = small.inputs(model)
        with torch.no_grad(), pytest.raises(ValueError, match=r"SeaCache.*disable_cache\(\)"):
            model(**inputs)
        model.disable_cache()
        with torch.no_grad():
            assert pytree.tree_leaves(model(**inputs))
        model.enable_cache(SeaCacheConfig(raw_vision_callback=vision))
    with fake_ranks(NUM_RANKS, rank=0):
        model = small.build(num_layers=1)
        model.enable_cache(SeaCacheConfig(raw_vision_callback=vision))
        with pytest.raises(ValueError, match="SeaCache"):
            parallelize(model)
