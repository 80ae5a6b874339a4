# SPDX-License-Identifier: Apache-2.0
"""Says which shares can be gathered, so that no reader can tell the gathered whole from the node.

What is gathered has memory of its own, without gaps, with its dims in the order of the node's. That
shows to a reader that looks at memory: one that is given strides and an offset, or that nothing is
known of. Such a reader gets a gathered node only if that fills its memory as well, and views of it
are made anew.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.ir.aten import SLICING, aten, is_alias, is_tensor, value_of
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.layout import Size, same
from cocodiff_compile.shard.token_share import WHOLE

_BY_STRIDES = frozenset(
    {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
)
_CARRIED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_KNOWN = ("aten", "prims", "prim", "_c10d_functional", "quantized")


def why_not_gathered(node: Node, looked_into: frozenset[Node]) -> str:
    """Returns why a share of a node cannot be gathered, an empty string if it can; `looked_into`
    is that of its graph.
    """
    value = value_of(node)
    if value.is_conj() or value.is_neg():
        return f"{node.name} is negated when it is read"
    spans = _spans_in_memory(value)
    if any(optimization_hint(stride) < optimization_hint(inside) for stride, inside in spans):
        return f"{node.name} holds elements more than once"
    has_gaps = not all(same(stride, inside) for stride, inside in spans)
    if node in looked_into and (has_gaps or _is_view(node)):
        return f"{node.name} is a view, and a reader looks at its memory"
    return ""


def is_carried(dtype: torch.dtype) -> bool:
    """Returns whether all-to-alls carry numbers of this kind, whatever the backend of the group."""
    return dtype in _CARRIED


def is_gathered_as_bytes(dtype: torch.dtype) -> bool:
    """Returns whether only the bytes of such numbers can be gathered; complex ones are gathered as
    pairs.
    """
    return dtype not in _CARRIED and not dtype.is_complex


def can_be_kept(node: Node) -> bool:
    """Returns whether a share of a node may leave its graph: another reader gathers it as it is."""
    value = value_of(node)
    return not (is_gathered_as_bytes(value.dtype) or value.is_conj() or value.is_neg())


def looked_into(graph: Graph) -> frozenset[Node]:
    """Returns the nodes of whose memory a reader may see more than their elements: what it reads,
    and what that is a view of.
    """
    found: set[Node] = set()
    for reader in graph.nodes:
        if reader.op == "call_function" and _sees_memory(reader):
            for source in filter(is_tensor, reader.all_input_nodes):
                found.update(_views(source))
    return frozenset(found)


def _spans_in_memory(value: torch.Tensor) -> list[tuple[Size, Size]]:
    """Returns the stride of each dim of more than one element, and how many elements lie inside of
    it.
    """
    dims = zip(value.stride(), value.shape, strict=True)
    larger = [(stride, size) for stride, size in dims if not same(size, 1)]
    spans: list[tuple[Size, Size]] = []
    inside: Size = 1
    for stride, size in sorted(larger, key=lambda dim: tuple(map(optimization_hint, dim))):
        spans.append((stride, inside))
        inside = stride * size
    return spans


def _sees_memory(node: Node) -> bool:
    target = node.target
    if target is operator.getitem or target is WHOLE or is_attention(target):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.OperatorBase)
    return target in _BY_STRIDES or target.namespace not in _KNOWN


def _views(node: Node) -> Iterator[Node]:
    yield node
    while _is_view(node):
        node = node.all_input_nodes[0]
        yield node


def _is_view(node: Node) -> bool:
    """Returns whether a node may show memory of another one."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in SLICING
    return is_alias(node)
