# SPDX-License-Identifier: Apache-2.0
"""shard-tokens on simulated ranks: optional inputs, and sizes that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from cocodiff_compile.lab.coverage.examine import examine
from cocodiff_compile.lab.distances import largest_error
from cocodiff_compile.lab.small_models import SMALL_MODELS

EVEN, UNEVEN = (48, 24), (45, 23)
CHANNELS = 64
NUM_RANKS = 4
LARGEST_ERROR = {"ltx": 1e-4}
"""LTX's captured graph is itself 5e-5 from eager: it takes sines of large numbers."""


def _residuals(count: int, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(2, tokens, CHANNELS, generator=noise) for _ in range(count)]


def _flux_control(tokens: int) -> dict[str, Any]:
    return {
        "controlnet_block_samples": _residuals(2, tokens),
        "controlnet_single_block_samples": _residuals(1, tokens, seed=5),
    }


def _times(tokens: int) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(0)
    return {"timestep": 300 * torch.randn(2, tokens, generator=noise).abs()}


MORE: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "ControlNet, FLUX": ("flux", _flux_control),
    "ControlNet, repeated": (
        "flux",
        lambda n: {
            "controlnet_block_samples": _residuals(1, n),
            "controlnet_blocks_repeat": True,
        },
    ),
    "ControlNet, Chroma": ("chroma", _flux_control),
    "ControlNet, SD3": ("sd3", lambda n: {"block_controlnet_hidden_states": _residuals(1, n)}),
    "ControlNet, Qwen-Image": (
        "qwen-image",
        lambda n: {"controlnet_block_samples": _residuals(2, n)},
    ),
    "a timestep per token, Wan": ("wan", _times),
    "a timestep per token, LTX": ("ltx", _times),
}
"""Inputs that the result must depend on, or else they prove nothing."""


def _difference(first: Any, second: Any) -> float:
    return largest_error(pytree.tree_leaves(first), pytree.tree_leaves(second))


QUICK = ("ControlNet, SD3", "a timestep per token, Wan")


@pytest.mark.parametrize("tokens", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "more", [pytest.param(key, marks=() if key in QUICK else pytest.mark.slow) for key in MORE]
)
def test_optional_inputs_are_shared_out_with_the_tokens(more: str, tokens: tuple[int, int]) -> None:
    name, make = MORE[more]
    small = SMALL_MODELS[name]
    model = small.build()
    fewer = small.inputs(model, batch=2, image_tokens=tokens[0], text_tokens=tokens[1])
    inputs = {**fewer, **make(tokens[0])}
    with torch.no_grad():
        assert _difference(model(**inputs), model(**fewer)) > 1e-4
    found = examine(more, model, inputs, NUM_RANKS)
    assert not found.reason
    assert found.num_sites == small.num_ulysses_attentions(model)
    assert found.error < LARGEST_ERROR.get(name, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, small in SMALL_MODELS.items() if small.has_mask])
def test_prompts_of_unequal_length(name: str) -> None:
    small = SMALL_MODELS[name]
    model = small.build(num_layers=1)
    inputs = small.inputs(model, batch=2, masked=True, image_tokens=45, text_tokens=23)
    found = examine(name, model, inputs, NUM_RANKS)
    assert not found.reason
    assert found.num_sites == small.num_ulysses_attentions(model)
    assert found.error < LARGEST_ERROR.get(name, 1e-5)


# Heads, image and text tokens. Of five text tokens on four ranks, padding fills the last share and
# a part of the one before; of two, two whole shares.
SIZES = [(6, 45, 5), (4, 3, 2)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "sd3" else pytest.mark.slow) for name in SMALL_MODELS],
)
def test_sizes_that_do_not_divide(name: str, size: tuple[int, int, int]) -> None:
    heads, image_tokens, text_tokens = size
    small = SMALL_MODELS[name]
    model = small.build(num_layers=1, heads=heads)
    inputs = small.inputs(model, image_tokens=image_tokens, text_tokens=text_tokens)
    found = examine(name, model, inputs, NUM_RANKS)
    assert not found.reason
    assert found.error < LARGEST_ERROR.get(name, 1e-5)
