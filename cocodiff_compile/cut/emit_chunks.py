# SPDX-License-Identifier: Apache-2.0
"""Emits nodes of a graph chunk by chunk, as their steps say.

A chunk of a node reads its chunk of each input that is cut, its part of what is aligned with
chunks but not cut itself, and all of the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.cut.cut import Cut, Step, numbers, sizes_of, stretch
from cocodiff_compile.cut.joining import emit_in_order_of, emit_joined
from cocodiff_compile.cut.rules import SUMMING, cut_of_operand, joined_lengths
from cocodiff_compile.cut.view_rules import SQUEEZE, squeezed_dims, taken_range
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    QUANTISED_MATMUL,
    RESHAPE,
    SLICING,
    aten,
    bound,
    emit,
    emit_contiguous,
    emit_shape,
    is_tensor,
    shape_of,
)
from cocodiff_compile.ir.layout import same, static_size


@dataclass
class EmitChunks:
    """Emits chunks of the nodes that have steps. With `keeps_ops`, chunks are equal and sizes may
    be symbolic: views keep their op and their arguments, but for the size that is cut. Otherwise
    all sizes are known, and views become reshapes and slices.
    """

    graph: Graph
    steps: Mapping[Node, Step]
    keeps_ops: bool = False
    chunks: dict[Node, list[Node | None]] = field(default_factory=dict)
    """The chunks of each node that was emitted; None for one without elements."""
    joined: dict[Node, Node] = field(default_factory=dict)

    def emit(self, node: Node, number: int) -> None:
        """Emits one chunk of a node, unless it has no elements."""
        cut = self.steps[node].cut
        chunks = self.chunks.setdefault(node, [None] * cut.count)
        if not (same(cut.lengths[number], 0) or self._is_left_out(node)):
            chunks[number] = self._emitted(node, number)

    def chunk(self, node: Node, number: int) -> Node:
        """Returns what stands for one chunk of a node."""
        found = self.chunks[node][number]
        assert found is not None, f"{node.name} has no elements in chunk {number}"
        return found

    def whole(self, node: Node) -> Node:
        """Returns all chunks of a node, joined once."""
        if node not in self.joined:
            self.joined[node] = self._join(node)
        return self.joined[node]

    def part(self, whole: Node, cut: Cut, number: int) -> Node:
        """Emits one chunk of a tensor that is there as a whole."""
        if self.keeps_ops:
            return self._equal_part(whole, cut, number)
        begin, end = stretch(cut, number, whole)
        if same(cut.outer, 1):
            return emit(self.graph, aten.slice.Tensor, whole, cut.dim, begin, end, like=whole)
        outer, *lengths = numbers((cut.outer, *cut.lengths), whole)
        shown = self._resized(whole, whole, cut.dim, outer, sum(lengths))
        part = emit(self.graph, aten.slice.Tensor, shown, cut.dim + 1, begin, end, like=whole)
        return self._resized(part, whole, cut.dim, outer * lengths[number])

    def _resized(self, source: Node, whole: Node, dim: int, *sizes: int) -> Node:
        """Emits `source` in the shape of `whole`, with other sizes in place of the one at `dim`."""
        shape = sizes_of(whole)
        shape = (*shape[:dim], *sizes, *shape[dim + 1 :])
        return emit(self.graph, aten.reshape.default, source, [*shape], like=whole)

    def _equal_part(self, whole: Node, cut: Cut, number: int) -> Node:
        graph, shape = self.graph, emit_shape(self.graph, whole)
        before, after = shape[: cut.dim], shape[cut.dim + 1 :]
        outer, inner = static_size(cut.outer), static_size(shape_of(whole)[cut.dim] // cut.outer)
        sizes = [-1 if outer is None else outer, cut.count]
        sizes.append(-1 if inner is None else inner // cut.count)
        viewed = emit(graph, aten.view.default, whole, [*before, *sizes, *after], like=whole)
        part = emit(graph, aten.select.int, viewed, cut.dim + 1, number, like=whole)
        if same(cut.outer, 1):
            return emit(graph, aten.squeeze.dim, part, cut.dim, like=whole)
        part = emit_contiguous(graph, part)
        return emit(graph, aten.view.default, part, [*before, -1, *after], like=whole)

    def _is_left_out(self, node: Node) -> bool:
        """Returns whether what takes the results of a split reads its input instead."""
        return not self.keeps_ops and node.target in SLICING and not is_tensor(node)

    def _emitted(self, node: Node, number: int) -> Node:
        slicing = node.all_input_nodes[0] if node.target is operator.getitem else node
        if slicing.target in SLICING and not self.keeps_ops:
            return self._slice(slicing, node, number)
        cut = self.steps[node].cut
        if node.target is aten.cat.default and bound(node)["dim"] % len(shape_of(node)) == cut.dim:
            return self._concatenated(node, number)
        inputs = {source: self._input(node, source, number) for source in node.all_input_nodes}
        if node.target in SUMMING:  # the order of terms, and so their rounding, is that of memory
            inputs = {
                source: emit_in_order_of(self.graph, part, source)
                for source, part in inputs.items()
            }
        if (
            node.target in QUANTISED_MATMUL
        ):  # takes rows, and their scales, only if they are contiguous
            inputs |= {
                source: emit_contiguous(self.graph, inputs[source])
                for source in self.steps[node].by_chunk
            }
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        if node.target is ALL_TO_ALL:
            return self._exchange(node, inputs[bound(node)["input"]], number)
        if node.target in RESHAPE or node.target is aten.expand.default:
            return self._reshape(node, args, number)
        like = node if is_tensor(node) else next(filter(is_tensor, inputs))
        assert callable(node.target)
        return emit(self.graph, node.target, *args, like=like, **kwargs)

    def _input(self, node: Node, source: Node, number: int) -> Node:
        """Returns what a chunk of a node reads: its chunk of an input, or all of it."""
        step = self.steps[node]
        if source not in step.by_chunk:
            return self.whole(source) if source in self.steps else source
        if source in self.steps:
            return self.chunk(source, number)
        cut = cut_of_operand(node, source, step.cut)
        return source if cut is None else self.part(source, cut, number)

    def _exchange(self, start: Node, source: Node, number: int) -> Node:
        arguments, cut = bound(start), self.steps[start].cut
        splits = arguments["input_split_sizes"]
        if cut.dim == 0:
            splits = [self._share(split, cut, number, source) for split in splits]
        source = emit_contiguous(self.graph, source)
        group = arguments["group_name"]
        return emit(self.graph, ALL_TO_ALL, source, splits, splits, group, like=source)

    def _reshape(self, node: Node, args: tuple[Any, ...], number: int) -> Node:
        cut, source = self.steps[node].cut, args[0]
        if self.keeps_ops and node.target in SQUEEZE:
            dims = squeezed_dims(node)
            return emit(self.graph, aten.squeeze.dims, source, dims, like=node)
        if self.keeps_ops and node.target is aten.unsqueeze.default:
            return emit(self.graph, aten.unsqueeze.default, *args, like=node)
        sizes = list(args[1] if self.keeps_ops else sizes_of(node))
        sizes[cut.dim] = self._share(sizes[cut.dim], cut, number, source)
        is_expand = node.target is aten.expand.default
        target = aten.expand.default if is_expand else aten.reshape.default
        return emit(self.graph, target, source, sizes, like=node)

    def _share(self, size: int | Node, cut: Cut, number: int, like: Node) -> int | Node:
        """Returns one chunk's part of a size argument; of a symbolic one, an equal share."""
        if isinstance(size, Node):
            return emit(self.graph, operator.floordiv, size, cut.count, like=like)
        if size == -1 or cut.is_equal:
            return size if size == -1 else size // cut.count
        lengths = numbers(cut.lengths, like)
        return size * lengths[number] // sum(lengths)

    def _slice(self, slicing: Node, node: Node, number: int) -> Node:
        """Emits the part of a chunk that a slice, or one result of a split, takes."""
        whole: Node = bound(slicing)["self"]
        chunk, cut = self.chunk(whole, number), self.steps[whole].cut
        dim = bound(slicing)["dim"] % len(shape_of(whole))
        if slicing is node and dim != cut.dim:
            assert callable(node.target)
            return emit(self.graph, node.target, chunk, *node.args[1:], like=node, **node.kwargs)
        begin, end = taken_range(slicing, node)
        if slicing.target is aten.unbind.int:
            return emit(self.graph, aten.select.int, chunk, dim, begin, like=node)
        if dim == cut.dim:
            first, last = stretch(cut, number, whole)
            if same(cut.outer, 1):
                begin, end = max(begin, first) - first, min(end, last) - first
            else:
                begin, end = 0, sizes_of(chunk)[dim]
        return emit(self.graph, aten.slice.Tensor, chunk, dim, begin, end, like=node)

    def _concatenated(self, node: Node, number: int) -> Node:
        """Emits a chunk of tensors that lie one behind the other in the dim that is cut."""
        tensors = bound(node)["tensors"]
        cuts = {item: self.steps[item].cut for item in tensors if item in self.steps}
        parts = [
            self.chunk(item, number) if item in cuts else item
            for item, lengths in zip(tensors, joined_lengths(node, tensors, cuts), strict=True)
            if lengths[number]
        ]
        if len(parts) == 1:
            return parts[0]
        return emit(self.graph, aten.cat.default, parts, self.steps[node].cut.dim, like=node)

    def _join(self, node: Node) -> Node:
        if self._is_left_out(node):
            source = node.all_input_nodes[0]
            assert callable(node.target)
            whole = self.whole(source)
            return emit(self.graph, node.target, whole, *node.args[1:], like=source, **node.kwargs)
        cut = self.steps[node].cut
        parts = [chunk for chunk in self.chunks[node] if chunk is not None]
        if len(parts) == 1:
            return parts[0]
        return emit_joined(self.graph, parts, cut.dim, cut.outer, node)
