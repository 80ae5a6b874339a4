# SPDX-License-Identifier: Apache-2.0
"""Published diffusion transformers at their full size, and what one forward is called with.

Sizes are those of the published configurations; nothing is downloaded and no weight exists. All of
them turn a square image of S pixels into (S / 16)^2 tokens. Batch 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab import small_model_inputs as inputs_of
from cocodiff_compile.lab.small_model_inputs import InputMaker, Inputs
from cocodiff_compile.lab.small_models import cast_parameters

PIXELS_PER_TOKEN = 16


@dataclass(frozen=True)
class PublicShape:
    """One published model. `layers` names what counts its blocks, one entry per kind of block."""

    name: str
    title: str
    class_name: str
    layers: Mapping[str, int]
    heads: int
    head_size: int
    text_tokens: int
    make_inputs: Callable[[InputMaker], Inputs]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings whose default in diffusers is another."""
    splits_text: bool = True
    """Text tokens are shared out among the ranks, as in joint attention."""
    frames: int = 1
    """Latent frames of a video."""
    max_resolution: int | None = None
    """The largest number of positions that the model has."""

    def num_tokens(self, resolution: int) -> int:
        """Returns the image tokens of a square image, or of all frames of a video."""
        return self.frames * (resolution // PIXELS_PER_TOKEN) ** 2

    def text_tokens_for(self, degree: int) -> int:
        """Returns the text tokens, rounded up to what `degree` ranks share, if they share text."""
        return -(-self.text_tokens // degree) * degree if self.splits_text else self.text_tokens

    def num_layers(self, at_most: int | None) -> dict[str, int]:
        return {key: min(count, at_most or count) for key, count in self.layers.items()}

    def build(self, max_layers: int | None = None) -> nn.Module:
        """Returns the model in bf16; call it under a fake mode, or it takes tens of GB."""
        import diffusers  # noqa: PLC0415  (slow, and optional)

        sizes = {"num_attention_heads": self.heads, "attention_head_dim": self.head_size}
        layers = self.num_layers(max_layers)
        model: nn.Module = getattr(diffusers, self.class_name)(**sizes, **layers, **self.config)
        cast_parameters(model, torch.bfloat16)
        return model.eval()

    def inputs(self, model: nn.Module, resolution: int, degree: int) -> Inputs:
        """Returns the keyword arguments of `forward`."""
        config: Any = model.config
        maker = InputMaker(
            next(model.parameters()).detach(),
            self.num_tokens(resolution),
            self.text_tokens_for(degree),
            frames=self.frames,
            latent_channels=config.in_channels,
            text_channels=config.get("joint_attention_dim") or config.text_dim,
            pooled_channels=config.get("pooled_projection_dim", 0),
        )
        return {**self.make_inputs(maker), "return_dict": False}


PUBLIC_SHAPES: dict[str, PublicShape] = {
    shape.name: shape
    for shape in (
        PublicShape(
            "qwen-image",
            "Qwen-Image, 20B",
            "QwenImageTransformer2DModel",
            {"num_layers": 60},
            heads=24,
            head_size=128,
            text_tokens=256,
            make_inputs=inputs_of.qwen_inputs,
        ),
        PublicShape(
            "flux",
            "FLUX.1-dev, 12B",
            "FluxTransformer2DModel",
            {"num_layers": 19, "num_single_layers": 38},
            heads=24,
            head_size=128,
            text_tokens=512,
            make_inputs=lambda make: {**inputs_of.flux_inputs(make), "guidance": make.full(1.0)},
            config={"guidance_embeds": True},
        ),
        PublicShape(
            "flux2",
            "FLUX.2-dev, 32B",
            "Flux2Transformer2DModel",
            {"num_layers": 8, "num_single_layers": 48},
            heads=48,
            head_size=128,
            text_tokens=512,
            make_inputs=inputs_of.flux2_inputs,
        ),
        PublicShape(
            "sd3.5",
            "Stable Diffusion 3.5 large, 8B",
            "SD3Transformer2DModel",
            {"num_layers": 38},
            heads=38,
            head_size=64,
            text_tokens=333,
            make_inputs=inputs_of.sd3_inputs,
            max_resolution=192 * PIXELS_PER_TOKEN,
            config={
                "caption_projection_dim": 2432,
                "pos_embed_max_size": 192,
                "qk_norm": "rms_norm",
            },
        ),
        PublicShape(
            "wan",
            "Wan 2.1 T2V, 14B, 81 frames",
            "WanTransformer3DModel",
            {"num_layers": 40},
            heads=40,
            head_size=128,
            text_tokens=512,
            make_inputs=inputs_of.wan_inputs,
            splits_text=False,
            frames=21,  # of latents: 81 frames of video, four to one behind the first
        ),
    )
}


def find_shape(name: str) -> PublicShape:
    if name not in PUBLIC_SHAPES:
        raise UserError(f"unknown model {name!r}; known: {', '.join(PUBLIC_SHAPES)}")
    return PUBLIC_SHAPES[name]


def check_resolution(shape: PublicShape, resolution: int, degree: int) -> None:
    """Raises UserError unless the image makes whole tokens that `degree` ranks can share."""
    if resolution < PIXELS_PER_TOKEN or resolution % PIXELS_PER_TOKEN:
        raise UserError(
            f"resolution {resolution} is not a multiple of {PIXELS_PER_TOKEN}, the pixels of one "
            f"token; take for example {max(1, round(resolution / PIXELS_PER_TOKEN)) * 16}"
        )
    if shape.max_resolution and resolution > shape.max_resolution:
        raise UserError(
            f"resolution {resolution} is more than {shape.name} has positions for: "
            f"{shape.max_resolution} at most"
        )
    if shape.num_tokens(resolution) % degree:
        raise UserError(
            f"resolution {resolution} makes {shape.num_tokens(resolution)} tokens of {shape.name}, "
            f"which do not divide among {degree} ranks; nearest that do: "
            f"{_nearest(shape, resolution, degree)}"
        )


def _nearest(shape: PublicShape, resolution: int, degree: int) -> str:
    sides = range(PIXELS_PER_TOKEN, 2 * resolution + 16 * degree, PIXELS_PER_TOKEN)
    fitting = [side for side in sides if shape.num_tokens(side) % degree == 0]
    below = [side for side in fitting if side < resolution][-1:]
    above = [side for side in fitting if side > resolution][:1]
    return ", ".join(map(str, [*below, *above]))
