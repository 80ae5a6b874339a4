# SPDX-License-Identifier: Apache-2.0
"""Ways to compile a pipeline so that its tokens are shared out, and what people do to it else."""

from __future__ import annotations

from typing import Any

import torch

from cocodiff_compile.lab import tiny_pipelines

EVERYTHING = {"shard": {"min_gain": 0}}
IMAGE_CHANNELS = 12


# Ways to compile


def whole(pipe: Any, backend: str) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend=backend, options=EVERYTHING)


def whole_and_controlnet(pipe: Any, backend: str) -> None:
    whole(pipe, backend)
    pipe.controlnet.compile(backend=backend, options=EVERYTHING)


def in_place(pipe: Any, backend: str) -> None:
    pipe.transformer.compile(backend=backend, options=EVERYTHING)


def by_block(pipe: Any, backend: str) -> None:
    """Compiles block by block, also where diffusers names no repeated blocks."""
    _each_block(pipe.transformer, backend, fullgraph=True)


def by_broken_block(pipe: Any, backend: str) -> None:
    """Compiles blocks with hooks that diffusers keeps out of graphs."""
    _each_block(pipe.transformer, backend, fullgraph=False)


def _each_block(model: Any, backend: str, fullgraph: bool) -> None:
    if model._repeated_blocks:
        model.compile_repeated_blocks(backend=backend, options=EVERYTHING, fullgraph=fullgraph)
        return
    for block in model.transformer_blocks:
        block.compile(backend=backend, options=EVERYTHING, fullgraph=fullgraph)


# Changes of a pipeline


def nothing(_pipe: Any) -> None:
    """Leaves the pipeline as it is."""


def add_lora(pipe: Any) -> None:
    tiny_pipelines.add_lora(pipe.transformer)


def load_ip_adapter(pipe: Any) -> None:
    """Loads random weights, laid out as in a file, the way `load_ip_adapter` does."""
    torch.manual_seed(3)
    config = pipe.transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    text = config.joint_attention_dim
    attention: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        for role in ("to_k_ip", "to_v_ip"):
            attention[f"{layer}.{role}.weight"] = torch.randn(width, text) / 3
            attention[f"{layer}.{role}.bias"] = torch.randn(width)
    projection = {
        "proj.weight": torch.randn(4 * text, IMAGE_CHANNELS) / 3,
        "proj.bias": torch.randn(4 * text),
        "norm.weight": torch.ones(text),
        "norm.bias": torch.zeros(text),
    }
    weights = {"image_proj": projection, "ip_adapter": attention}
    pipe.transformer._load_ip_adapter_weights(weights)


def image_arguments() -> dict[str, Any]:
    """Returns the arguments of a call that an IP adapter reads."""
    make = torch.Generator().manual_seed(8)
    return {
        "ip_adapter_image_embeds": [torch.randn(1, 1, IMAGE_CHANNELS, generator=make)],
        "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, IMAGE_CHANNELS)],
    }


def fuse(pipe: Any) -> None:
    pipe.transformer.fuse_qkv_projections()


def swap_processors(pipe: Any) -> None:
    """Sets attention processors that turn the order of the image's tokens round."""
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor  # noqa: PLC0415

    class Turning(FluxAttnProcessor):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **more: Any) -> Any:
            return super().__call__(attn, 2 * hidden_states.flip(1), *args, **more)

    pipe.transformer.set_attn_processor(Turning())


def enable_cache(pipe: Any) -> None:
    """Lets steps be skipped whose first block changes little."""
    from diffusers import FirstBlockCacheConfig  # noqa: PLC0415

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
