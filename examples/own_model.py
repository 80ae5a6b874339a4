# SPDX-License-Identifier: Apache-2.0
"""Compiles a diffusion transformer of one's own, which no library knows: nothing but torch in it.

    torchrun --nproc-per-node 4 examples/own_model.py
    torchrun --nproc-per-node 2 examples/own_model.py --tiny

Weights are random. With --tiny the model is small, runs on CPU, and is compared with itself
uncompiled. The large one takes each rank's accelerator: never run by this project.
"""

from __future__ import annotations

import torch
from shared import StepTimes, flags, report, save
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import cocodiff_compile


class Block(nn.Module):
    """Attention and an MLP, both scaled and shifted by what is drawn and by the time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, scale_mlp, shift_mlp = self.modulation(condition).unsqueeze(1).chunk(4, -1)
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class OwnTransformer(nn.Module):
    """Predicts the velocity of a picture: patches in, patches out, positions learned."""

    def __init__(self, side: int, width: int, heads: int, layers: int, patch: int = 2) -> None:
        super().__init__()
        self.grid = (side // patch, side // patch)
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(self.grid[0] * self.grid[1], width))
        self.kinds, self.time = nn.Embedding(10, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.ConvTranspose2d(width, 3, patch, patch)

    def forward(self, picture: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        x = self.patches(picture).flatten(2).transpose(1, 2) + self.places
        condition = self.kinds(kind) + self.time(time[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x.transpose(1, 2).unflatten(2, self.grid))


def draw(model: nn.Module, noise: Tensor, steps: int, times: StepTimes) -> Tensor:
    """Follows the velocity from noise to a picture, in steps of equal length."""
    picture, kind = noise, torch.full(noise.shape[:1], 3, device=noise.device)
    for step in range(steps):
        time = torch.full_like(kind, 1 - step / steps, dtype=noise.dtype)
        with torch.no_grad():
            picture = picture - model(picture, time, kind) / steps
        times()
    return (picture / 6 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu()


def main() -> None:
    given = flags(__doc__).parse_args()
    device = cocodiff_compile.init_distributed(device="cpu" if given.tiny else None)
    torch.manual_seed(0)  # the same weights and the same noise on every rank
    side, width, heads, layers = (16, 64, 4, 2) if given.tiny else (256, 1536, 24, 28)
    model = OwnTransformer(side, width, heads, layers).eval().to(device)
    noise = torch.randn(1, 3, side, side).to(device)
    expected = draw(model, noise, given.steps, StepTimes()) if given.tiny else None

    # So small a model gains nothing, and is shared out only if told that this does not matter.
    options = {"shard": {"min_gain": 0} if given.tiny else "tokens"}
    compiled = torch.compile(model, backend=given.backend, dynamic=False, options=options)

    times = StepTimes()
    with cocodiff_compile.collect_reports() as graphs:
        picture = draw(compiled, noise, given.steps, times)
    report(picture, expected, times, graphs)
    save(picture, given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
