# SPDX-License-Identifier: Apache-2.0
"""Says which shares can be gathered, so that no reader can tell the gathered whole from the node.

What is gathered has memory of its own, without gaps, with its dims in the order of the node's. That
shows to a reader that looks at memory: one that is given strides and an offset, or that nothing is
known of. Such a reader gets a gathered node only if that fills its memory as well, and views of it
are made anew.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.ir.aten import SLICING, aten, is_alias, is_tensor, slice_of, value_of
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.layout import Size, in_order, same
from cocodiff_compile.shard.wanted_cuts import slicing_of
from cocodiff_compile.shard.whole_of_shares import WHOLE

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


def kept_results(graph: Graph) -> frozenset[Node]:
    """Returns the results of a graph that may leave it as shares: another reader gathers them as
    they are, and no other result shows their memory.
    """
    shown = shown_together(graph)
    found = filter(is_tensor, graph.output_node().all_input_nodes)
    return frozenset(node for node in found if node not in shown and _can_be_kept(node))


def _can_be_kept(node: Node) -> bool:
    value = value_of(node)
    return not (is_gathered_as_bytes(value.dtype) or value.is_conj() or value.is_neg())


def shown_together(graph: Graph) -> frozenset[Node]:
    """Returns results of a graph that show the same memory, with the views between them: who writes
    to one of them changes the others. Those that show an input are left to AOTAutograd, and parts
    that do not overlap count as apart.
    """
    by_base: dict[Node, list[list[Node]]] = {}
    for node in filter(is_tensor, graph.output_node().all_input_nodes):
        chain = list(filter(is_tensor, _views(node)))[::-1]
        if chain[0].op != "placeholder":
            by_base.setdefault(chain[0], []).append(chain)
    found: set[Node] = set()
    for chains in by_base.values():
        for one, other in itertools.combinations(chains, 2):
            if not _are_apart(one, other):
                found.update(one, other)
    return frozenset(found)


def _are_apart(one: Sequence[Node], other: Sequence[Node]) -> bool:
    """Returns whether two chains of views of the same memory part into pieces of it."""
    parting = [pair for pair in zip(one, other, strict=False) if pair[0] is not pair[1]]
    parts = [part for part in map(_taken, parting[0]) if part is not None] if parting else []
    if len(parts) < 2 or parts[0][0] != parts[1][0]:
        return False
    (_, begin, length), (_, next_begin, _) = sorted(
        parts, key=lambda part: optimization_hint(part[1])
    )
    ordered = in_order((begin + length, next_begin))
    return ordered is not None and same(ordered[0], begin + length)


def _taken(node: Node) -> tuple[int, Size, Size] | None:
    """Returns the dim of a part of a tensor, where it begins and how long it is."""
    slicing = slicing_of(node)
    return slice_of(slicing, node if slicing is not node else None) if slicing else None


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
