"""Some tokens of what ranks send to each other: values are [P, before, tokens, behind].

`tokens` tells which, in order: [1, count] if these are the same for all P ranks, else [P, count].
Plain functions of tensors: passes trace them into graphs, tests call them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def changed_most(values: Tensor, compared: Tensor, streams: tuple[tuple[int, int], ...]) -> Tensor:
    """Those that differ most from what they are compared with, by the sum of absolute differences
    over ranks, samples, heads and their elements: of each of the `streams`, (tokens, count), that
    lie one behind the other, so many. What is not finite differs most.
    """
    change = (values.to(torch.float32) - compared.to(torch.float32)).abs().sum((0, 1, 3))
    change = torch.where(change < float("inf"), change, float("inf"))
    found, begin = [], 0
    for tokens, count in streams:
        most = change[begin : begin + tokens].topk(count).indices.sort().values
        found.append(most + begin)
        begin += tokens
    return torch.cat(found).unsqueeze(0)


def take_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """[P, before, count, behind]"""
    return values.gather(2, _index(tokens, values))


def put_tokens(values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """`values` with other rows for some tokens."""
    return values.scatter(2, _index(tokens, values), rows)


def _index(tokens: Tensor, values: Tensor) -> Tensor:
    num_ranks, before, _, behind = values.shape
    return tokens[:, None, :, None].expand(num_ranks, before, -1, behind)
