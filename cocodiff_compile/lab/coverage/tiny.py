"""Describes how a transformer class of diffusers is built tiny, and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TinyClass:
    """Holds what the constructor and `forward` of a class are called with."""

    config: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    """Draws the arguments of `forward` from torch's random numbers, which are seeded before."""
    needs: str = ""
    """What a call needs that is not installed everywhere; empty if nothing."""


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)
