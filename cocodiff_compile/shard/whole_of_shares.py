# SPDX-License-Identifier: Apache-2.0
"""The op that gathers the shares of a tensor that blocks hand to each other, and its opposite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cocodiff_compile.cut.cut import Cut
from cocodiff_compile.ir.aten import ALL_GATHER, WAIT


def gathered_rows(
    share: Tensor, dim: int, outer: int, segments: Sequence[int], num_ranks: int, group: str
) -> Tensor:
    """Gathers the shares of all ranks and puts their rows in order, without padding."""
    cut = Cut.over_ranks(dim, outer, segments, num_ranks)
    gathered = WAIT(ALL_GATHER(share.contiguous(), num_ranks, group))
    shape = list(share.shape)
    shape[dim : dim + 1] = [outer, shape[dim] // outer]
    blocks = gathered.reshape(num_ranks, *shape)
    parts = []
    for length, part in zip(
        segments, torch.split_with_sizes(blocks, list(cut.pieces), dim + 2), strict=True
    ):
        rows = part.movedim(0, dim + 1).flatten(dim + 1, dim + 2)
        parts.append(rows.narrow(dim + 1, 0, length))
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


whole_of_shares = torch.library.custom_op("cocodiff::whole_of_shares", mutates_args=())(
    gathered_rows
)


@whole_of_shares.register_fake
def _shape_of_whole(
    share: Tensor, dim: int, outer: int, segments: Sequence[int], num_ranks: int, group: str
) -> Tensor:
    del num_ranks, group
    shape = list(share.shape)
    shape[dim] = outer * sum(segments)
    return share.new_empty(shape)


WHOLE = torch.ops.cocodiff.whole_of_shares.default


def whole_cut(arguments: Mapping[str, Any]) -> Cut:
    """Returns how the operand of `WHOLE` is shared out."""
    return Cut.over_ranks(
        arguments["dim"], arguments["outer"], arguments["segments"], arguments["num_ranks"]
    )


def share_of(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """Returns the share of a rank, padded with zeros where a segment does not divide."""
    shape = list(whole.shape)
    shape[cut.dim : cut.dim + 1] = [int(cut.outer), int(cut.inner)]
    blocks = whole.reshape(shape)
    dim = cut.dim + 1
    shares = []
    for part, piece in zip(
        torch.split_with_sizes(blocks, list(cut.segments), dim), map(int, cut.pieces), strict=True
    ):
        begin = min(rank * piece, part.shape[dim])
        end = min(begin + piece, part.shape[dim])
        missing = [0, 0] * (part.dim() - 1 - dim) + [0, piece - (end - begin)]
        shares.append(torch.nn.functional.pad(part.narrow(dim, begin, end - begin), missing))
    return torch.cat(shares, dim).flatten(cut.dim, dim)
