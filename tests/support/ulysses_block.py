# SPDX-License-Identifier: Apache-2.0
"""The smallest model with a Ulysses attention: one block, written by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.hand_written import diffusers_in, diffusers_out

HEADS, HEAD_SIZE = 4, 8
WIDTH = HEADS * HEAD_SIZE


class Block(nn.Module):
    """Ulysses attention; `breaks` puts a graph break between exchange and attention."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.to_qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        legs = [diffusers_in(to(x).unflatten(2, (HEADS, -1))) for to in self.to_qkv]
        if self.breaks:
            torch._dynamo.graph_break()
        q, k, v = (leg.transpose(1, 2) for leg in legs)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.to_out(diffusers_out(attended).flatten(2))
