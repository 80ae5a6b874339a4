# SPDX-License-Identifier: Apache-2.0
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


HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
CHANNELS = {"in_channels": 4, "out_channels": 4}
WAN_LIKE = {**HEADS, **CHANNELS, "text_dim": 32, "freq_dim": 32, "ffn_dim": 128, "num_layers": 2}
"""What a constructor is given that takes the arguments of Wan's."""


def timesteps(*shape: int) -> torch.Tensor:
    return torch.full(shape, 500.0)


def text_mask(num_tokens: int, *padded: int) -> torch.Tensor:
    """Returns a mask [samples, tokens] of whole numbers; `padded` is how many each sample lacks."""
    lengths = num_tokens - torch.tensor(padded).unsqueeze(1)
    return (torch.arange(num_tokens) < lengths).long()


def video_inputs(num_channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": randn(2, num_channels, 4, 8, 8),
        "timestep": timesteps(2),
        "encoder_hidden_states": randn(2, 12, 32),
    }
