# SPDX-License-Identifier: Apache-2.0
"""Keeps parts of a tensor, and what is joined from them, in the order the whole has in memory.

`cat` returns a contiguous tensor. Where the whole was a permuted view, a matmul that reads the
joined tensor would take another kernel and give other bits; so the parts are permuted to the order
of the whole's memory, joined, and permuted back.

    whole [B, h, N, D], in memory [B, N, h, D]:  parts -> permute(0, 2, 1, 3) -> cat -> permute
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.ir.aten import aten, emit, emit_contiguous, emit_shape, value_of
from cocodiff_compile.ir.layout import Size, same, static_size


def memory_order(node: Node) -> list[int]:
    """Returns the dims of a tensor, largest stride first. A tensor that repeats elements has no
    such order; its copies are contiguous.
    """
    value = value_of(node)
    strides = [optimization_hint(stride) for stride in value.stride()]
    if any(strides[dim] == 0 and not same(size, 1) for dim, size in enumerate(value.shape)):
        return list(range(len(strides)))
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def dense_strides(node: Node) -> tuple[Size, ...]:
    """Returns the strides that a joined copy of a tensor has."""
    shape = value_of(node).shape
    strides: dict[int, Size] = {}
    stride: Size = 1
    for dim in reversed(memory_order(node)):
        strides[dim] = stride
        stride = stride * shape[dim]
    return tuple(strides[dim] for dim in range(len(shape)))


def is_dense(node: Node) -> bool:
    """Returns whether a joined copy of a tensor has the strides that the tensor has."""
    return all(map(same, value_of(node).stride(), dense_strides(node)))


def emit_joined(graph: Graph, parts: Sequence[Node], dim: int, outer: Size, whole: Node) -> Node:
    """Emits `whole`, joined from its parts. `dim` is [outer, elements], and the parts hold the
    elements of each of the `outer` blocks, one part behind the other.
    """
    order = memory_order(whole)
    is_permuted = order != list(range(len(order)))
    if is_permuted:
        parts = [emit(graph, aten.permute.default, part, order, like=part) for part in parts]
    joined = _joined(graph, parts, order.index(dim), outer, whole)
    return _permuted_back(graph, joined, order) if is_permuted else joined


def emit_in_order_of(graph: Graph, part: Node, whole: Node) -> Node:
    """Returns a part of `whole` whose dims lie in memory as those of the whole do: itself, or a
    copy.
    """
    order, value = memory_order(whole), value_of(part)
    strides = [optimization_hint(value.stride(dim)) for dim in order if value.shape[dim] != 1]
    if strides == sorted(strides, reverse=True):
        return part
    ordered = emit(graph, aten.permute.default, part, order, like=part)
    return _permuted_back(graph, emit_contiguous(graph, ordered), order)


def emit_dense_like(graph: Graph, source: Node, whole: Node) -> Node:
    """Returns a tensor, or a copy of it, without gaps and with its dims in memory as those of
    `whole` lie. Where `whole` is dense, strides are equal.
    """
    order = memory_order(whole)
    if order == list(range(len(order))):
        return emit_contiguous(graph, source)
    ordered = emit(graph, aten.permute.default, source, order, like=source)
    return _permuted_back(graph, emit_contiguous(graph, ordered), order)


def _permuted_back(graph: Graph, ordered: Node, order: Sequence[int]) -> Node:
    back = [order.index(dim) for dim in range(len(order))]
    return emit(graph, aten.permute.default, ordered, back, like=ordered)


def _joined(graph: Graph, parts: Sequence[Node], dim: int, outer: Size, like: Node) -> Node:
    if same(outer, 1):
        return _concatenated(graph, parts, dim, like)
    number = static_size(outer)
    blocks = []
    for part in parts:
        shape = emit_shape(graph, part)
        if number is None:
            inner = static_size(value_of(part).shape[dim] // outer)
            assert inner is not None, f"{part.name} has two symbolic sizes in dim {dim}"
            sizes = [-1, inner]
        else:
            sizes = [number, -1]
        split = [*shape[:dim], *sizes, *shape[dim + 1 :]]
        blocks.append(emit(graph, aten.reshape.default, part, split, like=part))
    joined = _concatenated(graph, blocks, dim + 1, like)
    shape = emit_shape(graph, joined)
    merged = [*shape[:dim], -1, *shape[dim + 2 :]]
    return emit(graph, aten.reshape.default, joined, merged, like=like)


def _concatenated(graph: Graph, parts: Sequence[Node], dim: int, like: Node) -> Node:
    """Emits a contiguous `cat`: torch's own takes over the order of channels-last parts, and parts
    with a dim of one element may count as such.
    """
    return emit_contiguous(graph, emit(graph, aten.cat.default, parts, dim, like=like))
