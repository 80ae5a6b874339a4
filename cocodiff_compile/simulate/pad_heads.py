"""Ulysses with fewer heads than ranks, or with heads that do not divide: heads of zeros are added.

The attention and its exchanges then carry the padded heads; projections, norms and RoPE do not. It
is an assumption about how a model would be run, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cocodiff_compile.parallel import parallelize


def padded_to(heads: int, degree: int) -> int:
    """The next number of heads that `degree` ranks can share."""
    return -(-heads // degree) * degree


def parallelize_padded(model: nn.Module, heads: int, degree: int) -> None:
    """`parallelize`, as if each attention had the padded number of heads."""
    attentions: list[Any] = [
        module for module in model.modules() if getattr(module, "heads", None) == heads
    ]
    for attention in attentions:
        attention.heads = padded_to(heads, degree)
    try:
        parallelize(model, ulysses_degree=degree)
    finally:
        for attention in attentions:
            attention.heads = heads


@contextmanager
def padded_heads(heads: int, degree: int) -> Iterator[None]:
    """Inside, every attention that exchanges heads pads them first and cuts them off after."""
    from diffusers.models import attention_dispatch  # noqa: PLC0415  (slow, and optional)

    plain = attention_dispatch._templated_context_parallel_attention
    padding = padded_to(heads, degree) - heads

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        legs = [F.pad(leg, (0, 0, 0, padding)) for leg in (query, key, value)]
        out: torch.Tensor = plain(*legs, *args, **kwargs)
        return out[:, :, :heads]

    if padding:
        attention_dispatch._templated_context_parallel_attention = attend
    try:
        yield
    finally:
        attention_dispatch._templated_context_parallel_attention = plain
