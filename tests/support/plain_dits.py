# SPDX-License-Identifier: Apache-2.0
"""Small transformers that nobody parallelised, as people write them outside of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 32, 8


def _heads(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """One projection for query, key and value; keys may have fewer heads than queries."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.sizes = [WIDTH, *(WIDTH // HEADS * key_heads,) * 2]
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        q, k, v = self.qkv(x).split(self.sizes, -1)
        roles = (_heads(q), _heads(k, self.key_heads), _heads(v, self.key_heads))
        is_grouped = self.key_heads != HEADS
        attended = functional.scaled_dot_product_attention(
            *roles, attn_mask=mask, enable_gqa=is_grouped, **options
        )
        return self.out(_joined(attended))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(**options)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        x = x + self.attention(self.norm(x), *args, **options)
        return x + self.mlp(self.norm(x))


class ClassConditional(nn.Module):
    """Patches of a picture, learned positions, scale and shift of every block by a class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.places = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.classes = nn.Embedding(4, 2 * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, picture: Tensor, kind: Tensor) -> Tensor:
        x = self.patches(picture).flatten(2).transpose(1, 2) + self.places
        scale, shift = self.classes(kind).unsqueeze(1).chunk(2, -1)
        for block in self.blocks:
            x = block(x * (1 + scale) + shift)
        x = self.head(x).unflatten(1, (4, 4)).unflatten(-1, (3, 2, 2))
        return torch.einsum("nhwcpq->nchpwq", x).reshape(picture.shape)


class JointWithMask(nn.Module):
    """Text and image in one sequence, padded text that is masked, scales per token."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(key_heads=key_heads) for _ in range(2))
        self.scales = nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, image: Tensor, is_text: Tensor) -> Tensor:
        x = torch.cat([text, image], 1)
        keys = torch.cat([is_text, is_text.new_ones(image.shape[:2])], 1)
        for block in self.blocks:
            x = block(x * self.scales(x).sigmoid(), keys[:, None, None])
        return x[:, text.shape[1] :]


class WithSkips(nn.Module):
    """The first half of the blocks is read again by the second, in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.ModuleList(Block() for _ in range(2))
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x, bias)
            kept.append(x)
        for block in self.up:
            x = block(self.merge(torch.cat([x, kept.pop()], -1)), bias)
        return x


class SpaceAndTime(nn.Module):
    """Frames attend to themselves, and places to themselves in other frames."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Block(), Block()

    def forward(self, video: Tensor) -> Tensor:
        frames = video.shape[1]
        x = self.space(video.flatten(0, 1)).unflatten(0, (-1, frames))
        x = self.time(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, video.shape[2]))
        return x.transpose(1, 2)


class CrossAttention(nn.Module):
    """Tokens attend to themselves, then to a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.q, self.kv = Block(), nn.Linear(WIDTH, WIDTH), nn.Linear(16, 2 * WIDTH)

    def forward(self, x: Tensor, prompt: Tensor, mask: Tensor) -> Tensor:
        x = self.block(x)
        k, v = map(_heads, self.kv(prompt).chunk(2, -1))
        return x + _joined(
            functional.scaled_dot_product_attention(_heads(self.q(x)), k, v, attn_mask=mask)
        )


@dataclass(frozen=True)
class Plain:
    """A model, what it is called with, and how its attentions are to be computed."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    modes: dict[str, int]


def _is_text(length: int) -> Tensor:
    return torch.arange(length).expand(2, -1) < torch.tensor([[length - 2], [length]])


PLAIN = {
    "class-conditional": Plain(
        ClassConditional, lambda: (torch.randn(2, 3, 8, 8), torch.tensor([1, 3])), {"Ulysses": 2}
    ),
    "masked text": Plain(
        JointWithMask,
        lambda: (torch.randn(2, 8, WIDTH), torch.randn(2, 24, WIDTH), _is_text(8)),
        {"Ulysses": 2},
    ),
    "masked text, uneven": Plain(
        JointWithMask,
        lambda: (torch.randn(2, 7, WIDTH), torch.randn(2, 21, WIDTH), _is_text(7)),
        {"Ulysses": 2},
    ),
    "grouped heads": Plain(
        lambda: JointWithMask(key_heads=4),
        lambda: (torch.randn(2, 8, WIDTH), torch.randn(2, 24, WIDTH), _is_text(8)),
        {"Ulysses": 2},
    ),
    "two heads of keys": Plain(
        lambda: JointWithMask(key_heads=2),
        lambda: (torch.randn(2, 8, WIDTH), torch.randn(2, 24, WIDTH), _is_text(8)),
        {"cross": 2},
    ),
    "skips, a bias per head, query and key": Plain(
        WithSkips,
        lambda: (torch.randn(2, 22, WIDTH), torch.randn(2, HEADS, 22, 22)),
        {"Ulysses": 4},
    ),
    "space and time": Plain(
        SpaceAndTime, lambda: (torch.randn(1, 4, 16, WIDTH),), {"Ulysses": 1, "batch": 1}
    ),
    "cross attention with a mask per query": Plain(
        CrossAttention,
        lambda: (torch.randn(2, 18, WIDTH), torch.randn(2, 5, 16), torch.randn(1, 1, 18, 5)),
        {"Ulysses": 1, "cross": 1},
    ),
}
