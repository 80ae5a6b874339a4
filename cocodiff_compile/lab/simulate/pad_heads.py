"""Ulysses with fewer heads than ranks, which `parallelize` refuses: some ranks would have none.

Heads that do not divide are padded with zeros in attention and its exchanges, and in a simulation
that goes for too few of them as well. It is an assumption, and the report says so.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cocodiff_compile.parallel import parallelize


def padded_to(heads: int, degree: int) -> int:
    """Returns the next number of heads that `degree` ranks can share."""
    return -(-heads // degree) * degree


def parallelize_padded(model: nn.Module, heads: int, degree: int) -> None:
    """Calls `parallelize` as if each attention had the padded number of heads."""
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
