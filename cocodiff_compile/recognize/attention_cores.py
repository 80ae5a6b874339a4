# SPDX-License-Identifier: Apache-2.0
"""Finds every attention of a graph: as one fused op, or as matmul, softmax, matmul."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import (
    BATCHED_MATMUL,
    added_mask,
    is_softmax,
    is_tensor,
    matmul_operands,
    parse_fused_attention,
    shape_of,
)
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.layout import Size
from cocodiff_compile.ir.records import Role
from cocodiff_compile.recognize.walk import between, walk_back


@dataclass(frozen=True)
class Operand:
    """Describes a query, key, value or result of an attention, and the meaning of its dims."""

    node: Node
    head_dim: int
    token_dim: int
    size_dim: int
    head_size: Size

    @classmethod
    def of(cls, node: Node, head_dim: int, token_dim: int, size_dim: int) -> Operand:
        # A result that nothing reads is not there as a tensor.
        size = shape_of(node)[size_dim] if is_tensor(node) else 0
        return cls(node, head_dim, token_dim, size_dim, size)


@dataclass(frozen=True)
class AttentionCore:
    """Describes one attention: its operands by role, and the tensor that it returns."""

    form: Literal["fused", "decomposed"]
    nodes: tuple[Node, ...]
    q: Operand
    k: Operand
    v: Operand
    o: Operand
    mask: Node | None
    is_causal: bool

    @property
    def output(self) -> Node:
        return self.o.node

    @property
    def operands(self) -> dict[Role, Operand]:
        return {"q": self.q, "k": self.k, "v": self.v}


def find_attention_cores(graph: Graph) -> list[AttentionCore]:
    """Returns all attentions in graph order."""
    cores = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_attention(node.target):
            cores.append(_fused_core(node))
        elif node.target in BATCHED_MATMUL and (core := _decomposed_core(node)) is not None:
            cores.append(core)
    return cores


def _fused_core(node: Node) -> AttentionCore:
    parsed = parse_fused_attention(node)
    op = parsed.op
    output = node if is_tensor(node) else _result(node, op.output)
    q, k, v, o = (
        Operand.of(operand, op.head_dim, op.token_dim, op.size_dim)
        for operand in (parsed.query, parsed.key, parsed.value, output)
    )
    return AttentionCore(
        form="fused",
        nodes=(node,),
        q=q,
        k=k,
        v=v,
        o=o,
        mask=parsed.mask,
        is_causal=parsed.is_causal,
    )


def _result(node: Node, place: int) -> Node:
    """Returns the reader of one of several results, or `node` if nothing reads that."""
    results = (u for u in node.users if u.target is operator.getitem and u.args[1] == place)
    return next(results, node)


def _decomposed_core(second: Node) -> AttentionCore | None:
    """Returns softmax(Q K^T) V ending in `second`, or None if this matmul ends no attention."""
    weights, value = matmul_operands(second)
    scores = [
        reached
        for reached in walk_back(weights)
        if reached.barrier.target in BATCHED_MATMUL and reached.barrier is not weights
    ]
    if len(scores) != 1:
        return None
    first = scores[0].barrier
    softmax = between(first, weights)
    if not is_softmax(softmax):
        return None
    query, key_transposed = matmul_operands(first)
    tokens = len(shape_of(query)) - 2
    return AttentionCore(
        form="decomposed",
        nodes=(first, *softmax, second),
        q=Operand.of(query, head_dim=0, token_dim=tokens, size_dim=tokens + 1),
        k=Operand.of(key_transposed, head_dim=0, token_dim=tokens + 1, size_dim=tokens),
        v=Operand.of(value, head_dim=0, token_dim=tokens, size_dim=tokens + 1),
        o=Operand.of(second, head_dim=0, token_dim=tokens, size_dim=tokens + 1),
        mask=added_mask(first, softmax),
        is_causal=False,
    )
