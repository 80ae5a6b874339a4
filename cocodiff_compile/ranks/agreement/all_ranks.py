# SPDX-License-Identifier: Apache-2.0
"""Exchanges values between all ranks of a group, by default the world; all of them call these."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import distributed as dist

T = TypeVar("T")


def gathered(value: T, group: Any = None) -> list[T]:
    """Returns the values of all ranks, by rank."""
    everyone: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def from_first_rank(value: T, group: Any = None) -> T:
    """Returns the value of the first rank of the group."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
