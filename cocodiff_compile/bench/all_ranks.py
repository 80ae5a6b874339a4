"""Values of all ranks, known to all of them. Every rank of the world calls these."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import distributed as dist

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """By rank."""
    everyone: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
