"""Samples pictures from the small trained model, with the same noise and prompts for every
variant.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocodiff_compile.lab.quality.pictures import random_prompts
from cocodiff_compile.lab.quality.small_dit import (
    CHANNELS,
    TOKENS_PER_SIDE,
    conditioning,
    to_pictures,
)


@dataclass(frozen=True)
class Sampling:
    """Holds the sampling settings. `guidance` other than 1 calls the model twice a step, with and
    without the prompt.
    """

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
