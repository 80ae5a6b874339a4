# SPDX-License-Identifier: Apache-2.0
"""Selects, reads and writes the rows of some tokens in exchanged values [P, before, tokens,
behind].

The argument `tokens` holds token indices in ascending order: [1, count] if they are the same for
all P ranks, [P, count] otherwise. These are plain functions of tensors, which passes trace into
graphs and tests call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def changed_most(values: Tensor, compared: Tensor, streams: tuple[tuple[int, int], ...]) -> Tensor:
    """Returns the indices, [1, count], of the tokens that differ most from `compared`, by the sum
    of absolute differences over ranks, samples, heads and their elements.

    `streams` holds (tokens, number to choose) of each stream, in the order in which they follow
    each other. A value that is not finite counts as the largest difference.
    """
    change = (values.to(torch.float32) - compared.to(torch.float32)).abs().sum((0, 1, 3))
    change = torch.where(change < float("inf"), change, float("inf"))
    chosen, begin = [], 0
    for tokens, count in streams:
        most = change[begin : begin + tokens].topk(count).indices.sort().values
        chosen.append(most + begin)
        begin += tokens
    return torch.cat(chosen).unsqueeze(0)


def take_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """Returns the rows of some tokens, [P, before, count, behind]."""
    return values.gather(2, _index(tokens, values))


def put_tokens(values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Returns `values` with the rows of some tokens replaced."""
    return values.scatter(2, _index(tokens, values), rows)


def _index(tokens: Tensor, values: Tensor) -> Tensor:
    num_ranks, before, _, behind = values.shape
    return tokens[:, None, :, None].expand(num_ranks, before, -1, behind)
