# SPDX-License-Identifier: Apache-2.0
"""Ulysses attentions that pad heads or tokens so that they divide, and drop the padding again.

On the skeleton of `hand_written.py`; ranks hold equal numbers of tokens, padded to a multiple of
BLOCK on each rank, as a kernel may want it. What is dropped lies between exchange and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support import hand_written as hw
from tests.support.hand_written import QKV, Block, Layout, all_to_all, num_ranks

BLOCK = 8
UNEVEN_HEADS = 10


# Heads


def _missing(size: int, multiple: int) -> int:
    return -size % multiple


def heads_by_pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, _missing(x.shape[2], num_ranks())))


def heads_by_cat(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    return torch.cat((x, x.new_zeros(batch, tokens, _missing(heads, num_ranks()), size)), dim=2)


def padding_heads(
    layout: Layout, pad: Callable[[Tensor], Tensor], heads: int = UNEVEN_HEADS
) -> Layout:
    return Layout(
        lambda qkv: layout.enter(tuple(pad(x) for x in qkv)),
        lambda x: layout.leave(x)[:, :, :heads],
    )


def heads_first_by_pad(x: Tensor) -> Tensor:
    """Padded where heads are the first dim already, [H, B, S, D]."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = F.pad(x.permute(2, 0, 1, 3), (0, 0) * 3 + (0, _missing(heads, ranks)))
    x = all_to_all(x).view(ranks, -1, batch, tokens, size)
    return x.permute(2, 0, 3, 1, 4).reshape(batch, ranks * tokens, -1, size)


HEADS_FIRST_BY_PAD = Layout(
    hw.each(heads_first_by_pad), lambda x: hw.head_first_out(x)[:, :, :UNEVEN_HEADS]
)


# Tokens: from [B, P*S, h, D], S padded to a multiple of BLOCK, those that are real


def rows_by_slices(x: Tensor, tokens: int) -> Tensor:
    padded = x.shape[1] // num_ranks()
    starts = [rank * padded for rank in range(num_ranks())]
    return torch.cat([x[:, start : start + tokens] for start in starts], dim=1)


def rows_by_index(x: Tensor, tokens: int) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device).unflatten(0, (num_ranks(), -1))
    return x[:, places[:, :tokens].flatten()]


def rows_by_block(x: Tensor, tokens: int) -> Tensor:
    return x.unflatten(1, (num_ranks(), -1))[:, :, :tokens].flatten(1, 2)


def rows_by_parts(x: Tensor, tokens: int) -> Tensor:
    """Two runs of every rank's rows, as of text and image; here they touch."""
    blocks = x.unflatten(1, (num_ranks(), -1))
    return torch.cat((blocks[:, :, :2], blocks[:, :, 2:tokens]), dim=2).flatten(1, 2)


def filled_by_pad(x: Tensor) -> Tensor:
    blocks = x.unflatten(1, (num_ranks(), -1))
    return F.pad(blocks, (0, 0) * 2 + (0, _missing(blocks.shape[2], BLOCK))).flatten(1, 2)


def filled_by_cat(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    zeros = x.new_zeros(batch, _missing(tokens // num_ranks(), BLOCK), heads, size)
    blocks = x.chunk(num_ranks(), dim=1)
    return torch.cat([part for block in blocks for part in (block, zeros)], dim=1)


@dataclass(frozen=True)
class PaddedTokens:
    """An attention on padded rows: keys and values without padding, queries with or without."""

    attend: hw.Attend
    keep: Callable[[Tensor, int], Tensor]
    fill: Callable[[Tensor], Tensor] | None = None
    """Puts the rows back that were dropped of the queries; None if they were kept."""
    tokens: int = 5

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.keep(k, self.tokens), self.keep(v, self.tokens)
        if self.fill is None:
            return self.attend(q, k, v)
        return self.fill(self.attend(self.keep(q, self.tokens), k, v))


class PadsTokens(Block):
    """Pads the tokens of this rank before its exchanges and drops the padding after them."""

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        padding = (0, 0, 0, 0, 0, _missing(x.shape[1], BLOCK))
        qkv: QKV = tuple(F.pad(leg, padding) for leg in self.project(x))
        out = self.layout.leave(self.attend(*self.layout.enter(qkv), *extra))
        return self.finish(out[:, : x.shape[1]], x)

    def reference(self, x: Tensor, *extra: Tensor) -> Tensor:
        assert isinstance(self.attend, PaddedTokens)
        return self.finish(self.attend.attend(*self.project(x), *extra), x)
