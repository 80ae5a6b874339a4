"""Makes inputs of the small models: seeded tensors, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]

TEXT_CHANNELS = 32
POOLED_CHANNELS = 24
LATENT_CHANNELS = 16


@dataclass(frozen=True)
class InputMaker:
    """Draws seeded tensors on a model's device, in its dtype, the same on every rank."""

    image_tokens: int
    text_tokens: int
    batch: int
    masked: bool
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def randn(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device="cpu")
        return drawn.to(self.device, self.dtype)

    def full(self, value: float) -> torch.Tensor:
        return torch.full((self.batch,), value, device=self.device, dtype=self.dtype)

    def tokens(self) -> torch.Tensor:
        return self.randn(self.batch, self.image_tokens, LATENT_CHANNELS)

    def text(self) -> torch.Tensor:
        return self.randn(self.batch, self.text_tokens, TEXT_CHANNELS)

    def pooled(self) -> torch.Tensor:
        return self.randn(self.batch, POOLED_CHANNELS)

    def grid(self) -> tuple[int, int]:
        """Returns height and width in tokens, as square as the number of tokens allows."""
        return _grid(self.image_tokens)

    def video_grid(self) -> tuple[int, int, int]:
        """Returns frames, height and width in tokens."""
        frames = next(f for f in (3, 2, 1) if self.image_tokens % f == 0)
        height, width = _grid(self.image_tokens // frames)
        return frames, height, width

    def video(self) -> torch.Tensor:
        frames, height, width = self.video_grid()
        return self.randn(self.batch, LATENT_CHANNELS, frames, 2 * height, 2 * width)

    def position_ids(self, num_axes: int) -> torch.Tensor:
        """Returns position ids [image tokens, axes]; the last two axes are row and column."""
        height, width = self.grid()
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        ids = torch.zeros(self.image_tokens, num_axes)
        ids[:, -2:] = torch.stack([rows.flatten(), columns.flatten()], dim=1)
        return ids.to(self.device, self.dtype)

    def text_mask(self) -> torch.Tensor:
        """Returns a mask [batch, text tokens], True for real tokens. Each sample has a different
        number of them.
        """
        kept = [
            self.text_tokens - (1 + i) * self.text_tokens // (self.batch + 2)
            for i in range(self.batch)
        ]
        return torch.arange(self.text_tokens, device=self.device) < torch.tensor(
            kept, device=self.device
        ).unsqueeze(1)


def _grid(tokens: int) -> tuple[int, int]:
    height = max(d for d in range(1, math.isqrt(tokens) + 1) if tokens % d == 0)
    return height, tokens // height


def flux_inputs(make: InputMaker) -> Inputs:
    return {
        "hidden_states": make.tokens(),
        "encoder_hidden_states": make.text(),
        "pooled_projections": make.pooled(),
        "timestep": make.full(0.5),
        "img_ids": make.position_ids(3),
        "txt_ids": torch.zeros(make.text_tokens, 3, device=make.device, dtype=make.dtype),
    }


def flux2_inputs(make: InputMaker) -> Inputs:
    text_ids = torch.zeros(make.text_tokens, 4, device=make.device, dtype=make.dtype)
    text_ids[:, 3] = torch.arange(make.text_tokens, device=make.device)
    return {
        "hidden_states": make.tokens(),
        "encoder_hidden_states": make.text(),
        "timestep": make.full(0.5),
        "img_ids": make.position_ids(4).expand(make.batch, -1, -1),
        "txt_ids": text_ids.expand(make.batch, -1, -1),
        "guidance": make.full(4.0),
    }


def chroma_inputs(make: InputMaker) -> Inputs:
    inputs = flux_inputs(make)
    del inputs["pooled_projections"]
    if make.masked:
        image = torch.ones(make.batch, make.image_tokens, dtype=torch.bool, device=make.device)
        inputs["attention_mask"] = torch.cat([make.text_mask(), image], dim=1)
    return inputs


def sd3_inputs(make: InputMaker) -> Inputs:
    height, width = make.grid()
    return {
        "hidden_states": make.randn(make.batch, LATENT_CHANNELS, 2 * height, 2 * width),
        "encoder_hidden_states": make.text(),
        "pooled_projections": make.pooled(),
        "timestep": make.full(500.0),
    }


def qwen_inputs(make: InputMaker) -> Inputs:
    return {
        "hidden_states": make.tokens(),
        "encoder_hidden_states": make.text(),
        "encoder_hidden_states_mask": make.text_mask() if make.masked else None,
        "timestep": make.full(0.5),
        "img_shapes": [[(1, *make.grid())]] * make.batch,
    }


def wan_inputs(make: InputMaker) -> Inputs:
    return {
        "hidden_states": make.video(),
        "encoder_hidden_states": make.text(),
        "timestep": make.full(500.0),
    }


def ltx_inputs(make: InputMaker) -> Inputs:
    frames, height, width = make.video_grid()
    return {
        "hidden_states": make.tokens(),
        "encoder_hidden_states": make.text(),
        "timestep": make.full(500.0),
        "encoder_attention_mask": make.text_mask().to(make.dtype) if make.masked else None,
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def hunyuan_inputs(make: InputMaker) -> Inputs:
    whole = torch.ones(make.batch, make.text_tokens, dtype=torch.bool, device=make.device)
    return {
        "hidden_states": make.video(),
        "encoder_hidden_states": make.text(),
        "encoder_attention_mask": (make.text_mask() if make.masked else whole).to(torch.long),
        "pooled_projections": make.pooled(),
        "timestep": make.full(500.0),
        "guidance": make.full(6000.0),
    }


def z_image_inputs(make: InputMaker) -> Inputs:
    # The model pads each part to a multiple of 32; one of 96 also divides by 3, 6 and 12.
    image_tokens, text_tokens = (-(-n // 96) * 96 for n in (make.image_tokens, make.text_tokens))
    x, captions = [], []
    for index in range(make.batch):
        share = 1 + index * make.masked
        height, width = _grid(image_tokens * share)
        x.append(make.randn(LATENT_CHANNELS, 1, 2 * height, 2 * width))
        captions.append(make.randn(text_tokens * share - make.masked, TEXT_CHANNELS))
    return {"x": x, "t": make.full(0.5), "cap_feats": captions}
