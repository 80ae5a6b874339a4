# SPDX-License-Identifier: Apache-2.0
"""Trains the small model that quality is judged by: about 25 minutes on two cores.

    python examples/train_small_dit.py [--steps N] [--out FILE]

Rectified flow on pictures drawn on the way: the model learns the velocity from a picture to noise,
`x_t = (1 - t) * picture + t * noise`. One prompt in ten is left out, so that guidance has an
unconditioned model to lean on. What is written is the running mean of the weights, in bfloat16.
Seeded: the same torch on the same machine writes the same file.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cocodiff_compile.lab.quality.pictures import draw_pictures, random_prompts
from cocodiff_compile.lab.quality.small_dit import (
    WEIGHTS,
    build_small_dit,
    conditioning,
    to_tokens,
)

BATCH = 32
PEAK_RATE = 2e-3
DROPPED = 0.1
KEPT_MEAN = 0.995


def train(steps: int, out: Path) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = build_small_dit()
    mean = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    warm_up = max(1, min(200, steps // 10))
    rates = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm_up + 1),
        ],
        [warm_up],
    )
    begin, recent = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        loss = velocity_loss(model, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        follow(mean, model, min(KEPT_MEAN, step / (step + 10)))
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 50 == 0 or step == steps:
            minutes = (time.perf_counter() - begin) / 60
            left = minutes / step * (steps - step)
            print(f"step {step}/{steps}  loss {recent:.4f}  {minutes:.1f} min, {left:.1f} left")
            save(mean, out)


def velocity_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    prompts = random_prompts(BATCH, generator)
    pictures = to_tokens(draw_pictures(prompts))
    noise = torch.randn(pictures.shape, generator=generator)
    time_of = torch.sigmoid(torch.randn(BATCH, generator=generator))
    t = time_of[:, None, None]
    given = conditioning(prompts, BATCH, torch.float32)
    kept = (torch.rand(BATCH, generator=generator) >= DROPPED).float()
    given["encoder_hidden_states"] = given["encoder_hidden_states"] * kept[:, None, None]
    given["pooled_projections"] = given["pooled_projections"] * kept[:, None]
    noisy = (1 - t) * pictures + t * noise
    (velocity,) = model(hidden_states=noisy, timestep=time_of, return_dict=False, **given)
    return nn.functional.mse_loss(velocity, noise - pictures)


def follow(mean: nn.Module, model: nn.Module, kept: float) -> None:
    with torch.no_grad():
        for old, new in zip(mean.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 1 - kept)


def save(model: nn.Module, out: Path) -> None:
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    save_file(state, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parsed = parser.parse_args()
    train(parsed.steps, parsed.out)


if __name__ == "__main__":
    main()
