# SPDX-License-Identifier: Apache-2.0
"""Makes inputs of diffusion transformers: seeded tensors, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]

TEXT_CHANNELS = 32
POOLED_CHANNELS = 24
LATENT_CHANNELS = 16


@dataclass(frozen=True)
class InputMaker:
    """Draws seeded tensors on the device and in the dtype of a tensor, the same on every rank."""

    like: torch.Tensor
    image_tokens: int
    text_tokens: int
    batch: int = 1
    masked: bool = False
    frames: int = 1
    latent_channels: int = LATENT_CHANNELS
    text_channels: int = TEXT_CHANNELS
    pooled_channels: int = POOLED_CHANNELS
    generator: torch.Generator = field(default_factory=torch.Generator)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device="cpu").to(self.like)

    def full(self, value: float) -> torch.Tensor:
        return self.like.new_full((self.batch,), value)

    def streams(self, latents: torch.Tensor, timestep: float) -> Inputs:
        """Returns the arguments that most models have in common."""
        return {
            "hidden_states": latents,
            "encoder_hidden_states": self.randn(self.batch, self.text_tokens, self.text_channels),
            "timestep": self.full(timestep),
        }

    def tokens(self) -> torch.Tensor:
        return self.randn(self.batch, self.image_tokens, self.latent_channels)

    def pooled(self) -> torch.Tensor:
        return self.randn(self.batch, self.pooled_channels)

    def video_grid(self) -> tuple[int, int, int]:
        """Returns frames, height and width in tokens."""
        return self.frames, *grid(self.image_tokens // self.frames)

    def video(self) -> torch.Tensor:
        frames, height, width = self.video_grid()
        return self.randn(self.batch, self.latent_channels, frames, 2 * height, 2 * width)

    def position_ids(self, num_axes: int) -> torch.Tensor:
        """Returns position ids [image tokens, axes]; the last two axes are row and column."""
        ids = self.like.new_zeros(*grid(self.image_tokens), num_axes)
        ids[..., -2] = torch.arange(ids.shape[0])[:, None]
        ids[..., -1] = torch.arange(ids.shape[1])
        return ids.flatten(0, 1)

    def text_mask(self) -> torch.Tensor:
        """Returns a mask [batch, text tokens], False for padding, of which each sample has more."""
        tokens = torch.arange(self.text_tokens, device=self.like.device)
        padded = [(1 + i) * self.text_tokens // (self.batch + 2) for i in range(self.batch)]
        return tokens < self.text_tokens - torch.tensor(padded, device=tokens.device).unsqueeze(1)


def grid(tokens: int) -> tuple[int, int]:
    """Returns height and width in tokens, as square as the number of tokens allows."""
    height = max(d for d in range(1, math.isqrt(tokens) + 1) if tokens % d == 0)
    return height, tokens // height


def flux_inputs(make: InputMaker) -> Inputs:
    return {**chroma_inputs(make), "pooled_projections": make.pooled()}


def flux2_inputs(make: InputMaker) -> Inputs:
    text_ids = make.like.new_zeros(make.text_tokens, 4)
    text_ids[:, 3] = torch.arange(make.text_tokens)
    return {
        **make.streams(make.tokens(), 0.5),
        "img_ids": make.position_ids(4).expand(make.batch, -1, -1),
        "txt_ids": text_ids.expand(make.batch, -1, -1),
        "guidance": make.full(4.0),
    }


def chroma_inputs(make: InputMaker) -> Inputs:
    inputs = {
        **make.streams(make.tokens(), 0.5),
        "img_ids": make.position_ids(3),
        "txt_ids": make.like.new_zeros(make.text_tokens, 3),
    }
    if make.masked:
        image = torch.ones(make.batch, make.image_tokens, dtype=torch.bool, device=make.like.device)
        inputs["attention_mask"] = torch.cat([make.text_mask(), image], dim=1)
    return inputs


def sd3_inputs(make: InputMaker) -> Inputs:
    height, width = grid(make.image_tokens)
    latents = make.randn(make.batch, make.latent_channels, 2 * height, 2 * width)
    return {**make.streams(latents, 500.0), "pooled_projections": make.pooled()}


def qwen_inputs(make: InputMaker) -> Inputs:
    return {
        **make.streams(make.tokens(), 0.5),
        "encoder_hidden_states_mask": make.text_mask() if make.masked else None,
        "img_shapes": [[(1, *grid(make.image_tokens))]] * make.batch,
    }


def wan_inputs(make: InputMaker) -> Inputs:
    return make.streams(make.video(), 500.0)


def ltx_inputs(make: InputMaker) -> Inputs:
    mask = make.text_mask().to(make.like.dtype) if make.masked else None
    sizes = dict(zip(("num_frames", "height", "width"), make.video_grid(), strict=True))
    return {**make.streams(make.tokens(), 500.0), "encoder_attention_mask": mask, **sizes}


def hunyuan_inputs(make: InputMaker) -> Inputs:
    mask = make.text_mask()
    return {
        **make.streams(make.video(), 500.0),
        "encoder_attention_mask": (mask if make.masked else torch.ones_like(mask)).long(),
        "pooled_projections": make.pooled(),
        "guidance": make.full(6000.0),
    }


def z_image_inputs(make: InputMaker) -> Inputs:
    # The model pads each part to a multiple of 32; one of 96 also divides by 3, 6 and 12.
    image_tokens, text_tokens = (-(-n // 96) * 96 for n in (make.image_tokens, make.text_tokens))
    x, captions = [], []
    for index in range(make.batch):
        share = 1 + index * make.masked
        height, width = grid(image_tokens * share)
        x.append(make.randn(make.latent_channels, 1, 2 * height, 2 * width))
        captions.append(make.randn(text_tokens * share - make.masked, make.text_channels))
    return {"x": x, "t": make.full(0.5), "cap_feats": captions}
