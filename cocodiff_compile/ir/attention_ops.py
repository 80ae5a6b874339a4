"""The ops that compute an attention by themselves, one record each.

Recognition, cuts, costs and the check of generated code read this table: to support another op, add
its entry. An op whose `unsupported` says why is recognised and declined by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Argument: TypeAlias = "str | int"
"""The name of an argument in the op's schema, or its place where the op has no schema."""
Shape: TypeAlias = "Sequence[int]"


def attention_flops(query: Shape, key: Shape, value: Shape) -> float:
    """Returns the FLOPs of both matmuls, for operands [B, H, N, D]."""
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@dataclass(frozen=True)
class AttentionOp:
    """Says where an op keeps what, and what may be done to it. Operands and output have `num_dims`
    dims, of which one counts heads, one tokens and one the elements of a head.
    """

    target: Any
    query: Argument = "query"
    key: Argument = "key"
    value: Argument = "value"
    mask: Argument | None = None
    causal: Argument | None = "is_causal"
    dropout: Argument | None = "dropout_p"
    output: int = 0
    """The place of the output among several results."""
    num_dims: int = 4
    head_dim: int = 1
    token_dim: int = 2
    size_dim: int = 3
    has_independent_heads: bool = True
    """Whether each head of the output depends on the same head of the operands alone."""
    has_independent_queries: bool = True
    """Whether each row of the output depends on one row of the query alone, unless it is causal."""
    flops: Callable[[Shape, Shape, Shape], float] = attention_flops
    """Computes the FLOPs from the shapes of query, key and value."""
    unsupported: str = ""
    """The reason why no pass may touch it."""


_aten = torch.ops.aten

ATTENTION_OPS: Mapping[Any, AttentionOp] = {
    op.target: op
    for op in (
        AttentionOp(_aten.scaled_dot_product_attention.default, mask="attn_mask"),
        AttentionOp(_aten._scaled_dot_product_attention_math.default, mask="attn_mask"),
        AttentionOp(_aten._scaled_dot_product_flash_attention.default),
        AttentionOp(_aten._scaled_dot_product_flash_attention_for_cpu.default, mask="attn_mask"),
        AttentionOp(_aten._scaled_dot_product_efficient_attention.default, mask="attn_bias"),
        AttentionOp(_aten._scaled_dot_product_cudnn_attention.default, mask="attn_bias"),
        AttentionOp(
            _aten._scaled_dot_product_fused_attention_overrideable.default, mask="attn_bias"
        ),
        AttentionOp(
            torch.ops.higher_order.flex_attention,
            query=0,
            key=1,
            value=2,
            causal=None,
            dropout=None,
            has_independent_heads=False,
            has_independent_queries=False,
            unsupported=(
                "flex_attention is not supported: its score_mod and block_mask may read the index "
                "of a head or of a token; use torch's scaled_dot_product_attention"
            ),
        ),
    )
}

FUSED_ATTENTION = frozenset(target for target, op in ATTENTION_OPS.items() if not op.unsupported)
"""The ops that passes may touch."""
