# SPDX-License-Identifier: Apache-2.0
"""Builds a small FLUX transformer that was trained, by `examples/train_small_dit.py`, to draw
pictures, and samples from it.

The quality of a lossy exchange depends on how activations change from step to step, which random
weights cannot show. diffusers is imported when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff_compile.lab.quality.pictures import NUM_WORDS, SIDE, VOCABULARY, random_prompts

WEIGHTS = Path(__file__).with_name("small_dit.safetensors")
PATCH = 2
TOKENS_PER_SIDE = SIDE // PATCH
CHANNELS = 3 * PATCH * PATCH
NUM_NAMES = sum(VOCABULARY)
"""The number of words of all positions together; a word has a unique index among them."""

CONFIG = {
    "patch_size": 1,
    "in_channels": CHANNELS,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": NUM_NAMES,
    "pooled_projection_dim": NUM_NAMES,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 12, 12),
}


def build_small_dit() -> nn.Module:
    """Returns the model with random weights."""
    from diffusers import FluxTransformer2DModel  # noqa: PLC0415  (slow, and optional)

    model: nn.Module = FluxTransformer2DModel(**CONFIG)
    return model


def load_small_dit(weights: Path = WEIGHTS) -> nn.Module:
    """Returns the trained model, in fp32, for inference."""
    from safetensors.torch import load_file  # noqa: PLC0415  (comes with diffusers)

    model = build_small_dit()
    model.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return model.eval().requires_grad_(False)


def to_tokens(pictures: Tensor) -> Tensor:
    """Converts pictures [B, 3, SIDE, SIDE] to tokens [B, tokens, channels]."""
    batch = len(pictures)
    patches = pictures.reshape(batch, 3, TOKENS_PER_SIDE, PATCH, TOKENS_PER_SIDE, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, TOKENS_PER_SIDE**2, CHANNELS)


def to_pictures(tokens: Tensor) -> Tensor:
    """Reverts `to_tokens`."""
    batch = len(tokens)
    patches = tokens.reshape(batch, TOKENS_PER_SIDE, TOKENS_PER_SIDE, 3, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, 3, SIDE, SIDE)


def conditioning(prompts: Tensor | None, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the inputs besides tokens and time; without prompts they are unconditioned."""
    words = torch.zeros(batch, NUM_WORDS, NUM_NAMES, dtype=dtype)
    if prompts is not None:
        first = torch.tensor((0, *VOCABULARY[:-1])).cumsum(0)
        words.scatter_(2, (prompts + first)[:, :, None], 1.0)
    index = torch.arange(TOKENS_PER_SIDE)
    image_ids = torch.zeros(TOKENS_PER_SIDE, TOKENS_PER_SIDE, 3)
    image_ids[..., 1], image_ids[..., 2] = index[:, None], index[None, :]
    return {
        "encoder_hidden_states": words,
        "pooled_projections": words.sum(1),
        "txt_ids": torch.zeros(NUM_WORDS, 3),
        "img_ids": image_ids.reshape(-1, 3),
    }


@dataclass(frozen=True)
class Sampling:
    """Holds settings. Unless `guidance` is 1, a step also calls the model without the prompt."""

    steps: int = 50
    guidance: float = 2.0
    batch: int = 4
    dtype: torch.dtype = torch.float32

    def prompts(self, seed: int) -> Tensor:
        return random_prompts(self.batch, torch.Generator().manual_seed(2 * seed))

    def noise(self, seed: int) -> Tensor:
        shape = (self.batch, TOKENS_PER_SIDE**2, CHANNELS)
        return torch.randn(shape, generator=torch.Generator().manual_seed(2 * seed + 1))


Branch = Callable[[str], AbstractContextManager[None]]


def sample_pictures(
    model: Callable[..., Any],
    sampling: Sampling,
    seed: int,
    branch: Branch = lambda _name: nullcontext(),
    end_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Returns pictures [batch, 3, SIDE, SIDE] in -1..1. `branch` is entered around each guidance
    pass, `end_step` is called after each step.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: PLC0415  (slow, and optional)

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sampling.steps)
    latents = sampling.noise(seed)
    prompts = sampling.prompts(seed)
    given = {"cond": conditioning(prompts, sampling.batch, sampling.dtype)}
    if sampling.guidance != 1:
        given["uncond"] = conditioning(None, sampling.batch, sampling.dtype)
    for timestep in scheduler.timesteps:
        time = (timestep / 1000).expand(sampling.batch).to(sampling.dtype)
        velocities = {}
        for name, inputs in given.items():
            tokens = latents.to(sampling.dtype)
            with branch(name), torch.no_grad():
                (velocity,) = model(
                    hidden_states=tokens, timestep=time, return_dict=False, **inputs
                )
            velocities[name] = velocity.float()
        velocity = velocities["cond"]
        if "uncond" in velocities:
            unconditioned = velocities["uncond"]
            velocity = unconditioned + sampling.guidance * (velocity - unconditioned)
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        end_step()
    return to_pictures(latents).clamp(-1, 1)
