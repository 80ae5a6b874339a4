"""Some tokens of what one rank sends to each other one: [P, before, tokens, behind].

Plain functions of tensors: passes trace them into graphs, tests call them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def changed_most(values: Tensor, compared: Tensor, count: int) -> Tensor:
    """The `count` tokens that differ most from what they are compared with, by the sum of absolute
    differences over samples, heads and their elements; in order. What is not finite differs most.
    """
    change = (values.to(torch.float32) - compared.to(torch.float32)).abs().sum((0, 1, 3))
    change = torch.where(change < float("inf"), change, float("inf"))
    return change.topk(count).indices.sort().values


def take_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    return values[:, :, tokens]


def put_sent(values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """`values` with other rows for some tokens, the same towards all ranks."""
    index = tokens.view(1, 1, -1, 1).expand_as(rows)
    return values.scatter(2, index, rows)


def put_received(values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """`values` with other rows for some tokens, `tokens` holds those of each rank: [P * count]."""
    index = tokens.view(len(rows), 1, -1, 1).expand_as(rows)
    return values.scatter(2, index, rows)


def take_received(values: Tensor, tokens: Tensor) -> Tensor:
    """The rows that `put_received` would replace."""
    num_ranks, before, _, behind = values.shape
    index = tokens.view(num_ranks, 1, -1, 1).expand(num_ranks, before, -1, behind)
    return values.gather(2, index)


def finite_or(rows: Tensor, old: Tensor) -> Tensor:
    """What is remembered of rows that travel as they are."""
    return torch.where(rows.abs() < float("inf"), rows, old)
