# SPDX-License-Identifier: Apache-2.0
"""Emits what one rank computes of a graph whose tokens are shared out.

A node is computed as a whole on every rank, or each rank computes its share. Where a share is read
as a whole it is gathered, and where a whole is read as a share a rank takes its part of it; each
conversion is emitted once. The number of the rank is an input of the graph, so that all ranks have
the same graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.cut.cut import Cut, numbers
from cocodiff_compile.cut.joining import emit_dense_like
from cocodiff_compile.cut.view_rules import segments_within, taken_range, written_range
from cocodiff_compile.ir.aten import (
    ALL_GATHER,
    ALL_TO_ALL,
    QUANTISED_MATMUL,
    RESHAPE,
    WAIT,
    aten,
    bound,
    emit,
    emit_contiguous,
    is_tensor,
    parse_fused_attention,
    shape_of,
    value_of,
)
from cocodiff_compile.ir.layout import Size, same, static_size
from cocodiff_compile.ir.size_nodes import SizeNodes
from cocodiff_compile.shard.gathers import is_gathered_as_bytes
from cocodiff_compile.shard.shares import AttentionMode, Shared
from cocodiff_compile.shard.wanted_cuts import slicing_of
from cocodiff_compile.shard.whole_of_shares import WHOLE


@dataclass
class EmitShares:
    graph: Graph
    group: str
    rank: Node
    """The input that holds the number of this rank in its group."""
    steps: Mapping[Node, Shared]
    """The nodes of which each rank computes its share."""
    shares: dict[Node, Node] = field(default_factory=dict)
    gathered: dict[Node, Node] = field(default_factory=dict)
    _parts: dict[Node, list[tuple[Cut, Node]]] = field(default_factory=dict)
    """The shares that were taken of wholes."""

    def __post_init__(self) -> None:
        self._sizes = SizeNodes(self.graph)

    def emit(self, node: Node) -> None:
        """Emits the share of a node, where the graph inserts."""
        self.shares[node] = self._emitted(node)

    def whole(self, node: Node) -> Node:
        """Returns all of a node, gathered if it was shared out."""
        if node not in self.steps:
            return node
        if node not in self.gathered:
            self.gathered[node] = emit_dense_like(self.graph, self._gather(node), node)
        return self.gathered[node]

    def share(self, node: Node, cut: Cut) -> Node:
        """Returns a share of a node with this cut."""
        if node in self.steps and self.steps[node].cut.is_like(cut):
            return self.shares[node]
        taken = self._parts.setdefault(node, [])
        part = next((part for other, part in taken if other.is_like(cut)), None)
        if part is None:
            part = self._mine(self._by_rank(self.whole(node), cut), cut)
            taken.append((cut, part))
        return part

    # The share of a node

    def _emitted(self, node: Node) -> Node:
        step = self.steps[node]
        if step.mode is not None:
            return self._attend(node, step)
        if node.target is WHOLE:
            share: Node = bound(node)["share"]
            return share
        if (slicing := slicing_of(node)) is not None:
            return self._slice(slicing, node)
        if node.target is operator.getitem and node.all_input_nodes[0] in self.steps:
            source = node.all_input_nodes[0]
            if self.steps[source].mode is not None:
                return self.shares[source]
            index = node.args[1]
            return emit(self.graph, operator.getitem, self.shares[source], index, like=node)
        inputs = {source: self._input(step, source) for source in node.all_input_nodes}
        if node.target in QUANTISED_MATMUL:
            inputs |= {item: emit_contiguous(self.graph, inputs[item]) for item in step.needs}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        if node.target in RESHAPE or node.target is aten.expand.default:
            target = (
                aten.expand.default if node.target is aten.expand.default else aten.reshape.default
            )
            shape = list(map(self._sizes.argument, self._local_shape(node, step.cut)))
            return emit(self.graph, target, args[0], shape, like=node)
        if node.target is aten.slice_scatter.default:
            return self._write(node, inputs)
        like = node if is_tensor(node) else next(filter(is_tensor, node.all_input_nodes))
        assert callable(node.target)
        return emit(self.graph, node.target, *args, like=like, **kwargs)

    def _input(self, step: Shared, source: Node) -> Node:
        if not is_tensor(source) and source in self.steps:
            return self.shares[source]
        need = step.needs.get(source)
        return self.whole(source) if need is None else self.share(source, need)

    def _local_shape(self, node: Node, cut: Cut) -> list[Size]:
        shape = list(shape_of(node))
        shape[cut.dim] = cut.outer * cut.lengths[0]
        return shape

    def _slice(self, slicing: Node, node: Node) -> Node:
        (whole, need) = next(iter(self.steps[node].needs.items()))
        share = self.share(whole, need)
        dim = bound(slicing)["dim"] % len(shape_of(whole))
        if slicing.target is aten.select.int:
            return emit(self.graph, aten.select.int, share, dim, bound(slicing)["index"], like=node)
        if slicing.target is aten.unbind.int:
            return emit(self.graph, aten.select.int, share, dim, node.args[1], like=node)
        if dim != need.dim:
            if slicing is node:
                options = bound(node)
                rest = (options["start"], options["end"], options["step"])
                return emit(self.graph, aten.slice.Tensor, share, dim, *rest, like=node)
            begin, end = taken_range(slicing, node)
        elif same(shape_of(whole)[dim], shape_of(node)[dim]):
            return share
        else:
            first, last = segments_within(need, *taken_range(slicing, node), node)
            begin, end = sum(need.pieces[:first]), sum(need.pieces[:last])
        return self._sliced(share, dim, begin, end, like=node)

    def _write(self, node: Node, inputs: Mapping[Node, Node]) -> Node:
        arguments, cut = bound(node), self.steps[node].cut
        dim = arguments["dim"] % len(shape_of(node))
        rest = (arguments["start"], arguments["end"], arguments["step"])
        if dim == cut.dim:
            first, last = segments_within(cut, *written_range(node), node)
            places = (sum(cut.pieces[:first]), sum(cut.pieces[:last]))
            rest = (*map(self._sizes.argument, places), 1)  # type: ignore[assignment]
        operands = (inputs[arguments["self"]], inputs[arguments["src"]])
        return emit(self.graph, aten.slice_scatter.default, *operands, dim, *rest, like=node)

    # Between wholes and shares

    def _by_rank(self, whole: Node, cut: Cut, value: float | bool = 0) -> Node:
        """Emits a whole with the shares of all ranks one behind the other, padded with `value`: the
        dim that is cut becomes [outer, ranks, share].
        """
        shape, outer = shape_of(whole), cut.outer
        before, behind = shape[: cut.dim], shape[cut.dim + 1 :]
        blocks = self._reshaped(whole, [*before, outer, cut.inner, *behind])
        dim = cut.dim + 1
        parts = []
        for begin, length, piece in _places(cut):
            part = blocks
            if not same(length, cut.inner):
                part = self._sliced(blocks, dim, begin, begin + length)
            missing = static_size(piece * cut.count - length)
            if missing:  # a symbolic length divides
                part = self._padded(part, dim, missing, value)
            parts.append(self._reshaped(part, [*before, outer, cut.count, piece, *behind]))
        return self._joined(parts, dim + 1)

    def _mine(self, by_rank: Node, cut: Cut) -> Node:
        """Emits the share of this rank, from those of all ranks."""
        shape = list(shape_of(by_rank))
        index = [None] * (cut.dim + 1) + [self.rank]
        mine = emit(self.graph, aten.index.Tensor, by_rank, index, like=by_rank)
        return self._reshaped(
            mine, [*shape[: cut.dim], shape[cut.dim] * shape[cut.dim + 2], *shape[cut.dim + 3 :]]
        )

    def _gather(self, node: Node) -> Node:
        cut, share = self.steps[node].cut, self.shares[node]
        gathered = self._gathered(emit_contiguous(self.graph, share), cut.count)
        shape = shape_of(share)
        before, behind = shape[: cut.dim], shape[cut.dim + 1 :]
        outer, length = cut.outer, cut.lengths[0]
        blocks = self._reshaped(gathered, [cut.count, *before, outer, length, *behind])
        parts: list[Node] = []
        begin: Size = 0
        dim = len(before) + 2
        for _, real, piece in _places(cut):
            part = blocks
            if not same(piece, length):
                part = self._sliced(blocks, dim, begin, begin + piece)
            order = [*range(1, dim), 0, *range(dim, len(behind) + dim + 1)]
            part = emit(self.graph, aten.permute.default, part, order, like=share)
            part = self._reshaped(part, [*before, outer, cut.count * piece, *behind])
            if not same(real, cut.count * piece):
                part = self._sliced(part, dim - 1, 0, real)
            parts.append(part)
            begin = begin + piece
        return self._reshaped(self._joined(parts, dim - 1), shape_of(node))

    def _gathered(self, share: Node, count: int) -> Node:
        """Emits a gather of all shares, one behind the other; of their bytes, where the backend of
        the group may not carry their numbers.
        """
        dtype = value_of(share).dtype
        if is_gathered_as_bytes(dtype):
            rows = emit(self.graph, aten.view.dtype, share, torch.uint8, like=share)
            return emit(self.graph, aten.view.dtype, self._gathered(rows, count), dtype, like=share)
        started = emit(self.graph, ALL_GATHER, share, count, self.group, like=share)
        return emit(self.graph, WAIT, started, like=share)

    # Attentions

    def _attend(self, node: Node, step: Shared) -> Node:
        attention = parse_fused_attention(node)
        roles = (attention.query, attention.key, attention.value)
        given = {item: self._input(step, item) for item in roles}
        mask = attention.mask
        if step.mode is AttentionMode.ULYSSES:
            op = attention.op
            keys = step.needs[attention.key]
            by_heads = {item: self._to_heads(given[item], op, step.cut.count) for item in given}
            for item in dict.fromkeys((attention.key, attention.value)):
                by_heads[item] = self._without_padding(by_heads[item], op.token_dim, keys)
            if mask is not None:
                by_heads[mask] = self._mask_of_heads(mask, step.cut, keys)
            result = self._call(node, by_heads, op.output)
            (heads,) = numbers(shape_of(attention.query)[op.head_dim : op.head_dim + 1], node)
            return self._to_tokens(result, op, step.cut.count, heads)
        if mask is not None:
            given[mask] = self._mask_of_share(mask, step)
        return self._call(node, given, attention.op.output)

    def _call(self, node: Node, inputs: Mapping[Node, Node], output: int) -> Node:
        def read(source: Node) -> Node:
            return inputs[source] if source in inputs else self.whole(source)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), read)
        assert callable(node.target)
        like = node.all_input_nodes[0]
        result = emit(self.graph, node.target, *args, like=like, **kwargs)
        if is_tensor(node):
            return result
        return emit(self.graph, operator.getitem, result, output, like=like)

    def _to_heads(self, share: Node, op: Any, count: int) -> Node:
        """Emits the exchange after which a rank has all tokens of some heads."""
        (heads,) = numbers(shape_of(share)[op.head_dim : op.head_dim + 1], share)
        if missing := -heads % count:
            share = self._padded(share, op.head_dim, missing)
        return self._exchanged(share, op.head_dim, op.token_dim, count)

    def _to_tokens(self, result: Node, op: Any, count: int, heads: int) -> Node:
        """Emits the exchange after which a rank has all heads of its tokens again."""
        share = self._exchanged(result, op.token_dim, op.head_dim, count)
        if not same(shape_of(share)[op.head_dim], heads):
            share = self._sliced(share, op.head_dim, 0, heads)
        return share

    def _exchanged(self, source: Node, scatter: int, gather: int, count: int) -> Node:
        """Emits an all-to-all that scatters one dim over the ranks and gathers another one."""
        shape = list(shape_of(source))
        split = [*shape[:scatter], count, shape[scatter] // count, *shape[scatter + 1 :]]
        blocks = self._reshaped(source, split)
        order = [scatter, *(dim for dim in range(len(split)) if dim != scatter)]
        packed = emit(self.graph, aten.permute.default, blocks, order, like=source)
        packed = emit_contiguous(self.graph, packed)
        splits = [1] * count
        started = emit(self.graph, ALL_TO_ALL, packed, splits, splits, self.group, like=source)
        arrived = emit(self.graph, WAIT, started, like=source)
        order = [*range(1, gather + 1), 0, *range(gather + 1, len(split))]
        unpacked = emit(self.graph, aten.permute.default, arrived, order, like=source)
        shape[scatter] = shape[scatter] // count
        shape[gather] = shape[gather] * count
        return self._reshaped(unpacked, shape)

    def _without_padding(self, tokens: Node, dim: int, cut: Cut) -> Node:
        """Emits the rows of all ranks that are tokens."""
        spans = _spans(cut)
        if len(spans) == 1 and same(spans[0][1], shape_of(tokens)[dim]):
            return tokens
        return self._joined([self._sliced(tokens, dim, *span) for span in spans], dim)

    def _mask_of_heads(self, mask: Node, queries: Cut, keys: Cut) -> Node:
        """Emits what a mask says about the heads of this rank, in the order of tokens that
        exchanges deliver.
        """
        whole = self.whole(mask)
        num_dims = len(shape_of(mask))
        is_bool = value_of(mask).dtype is torch.bool
        for dim, cut in ((num_dims - 1, keys), (num_dims - 2, queries)):
            if dim < 0 or same(shape_of(whole)[dim], 1):
                continue
            by_rank = self._by_rank(whole, cut.at(dim), value=is_bool)
            shape = list(shape_of(whole))
            shape[dim] = cut.count * cut.lengths[0]
            whole = self._reshaped(by_rank, shape)
            if cut is keys:
                whole = self._without_padding(whole, dim, keys)
        heads = num_dims - 3
        if heads >= 0 and not same(size := shape_of(whole)[heads], 1):
            cut = Cut.over_ranks(heads, 1, (size,), queries.count)
            whole = self._mine(self._by_rank(whole, cut, value=is_bool), cut)
        return whole

    def _mask_of_share(self, mask: Node, step: Shared) -> Node:
        """Emits the rows of a mask for the queries, or the samples, of this rank."""
        away = 2 if step.mode is AttentionMode.CROSS else 4
        dim = len(shape_of(mask)) - away
        if dim < 0 or same(shape_of(mask)[dim], 1):
            return self.whole(mask)
        return self.share(mask, step.cut.at(dim))

    # Ops

    def _reshaped(self, source: Node, shape: Sequence[Size]) -> Node:
        before = shape_of(source)
        if len(before) == len(shape) and all(map(same, before, shape)):
            return source
        sizes = list(map(self._sizes.argument, shape))
        return emit(self.graph, aten.reshape.default, source, sizes, like=source)

    def _sliced(
        self, source: Node, dim: int, begin: Size, end: Size, like: Node | None = None
    ) -> Node:
        places = map(self._sizes.argument, (begin, end))
        return emit(self.graph, aten.slice.Tensor, source, dim, *places, like=like or source)

    def _padded(self, source: Node, dim: int, count: int, value: float | bool = 0) -> Node:
        behind = len(shape_of(source)) - 1 - dim
        pads = [0, 0] * behind + [0, count]
        return emit(self.graph, aten.constant_pad_nd.default, source, pads, value, like=source)

    def _joined(self, parts: Sequence[Node], dim: int) -> Node:
        if len(parts) == 1:
            return parts[0]
        return emit(self.graph, aten.cat.default, [*parts], dim, like=parts[0])


def _places(cut: Cut) -> list[tuple[Size, Size, Size]]:
    """Returns where each segment begins, its length, and how much of it a share holds."""
    begins = itertools.accumulate(cut.segments, initial=0)
    return list(zip(begins, cut.segments, cut.pieces, strict=False))


def _spans(cut: Cut) -> list[tuple[Size, Size]]:
    """Returns the stretches of real rows among the shares of all ranks, one behind the other."""
    spans: list[tuple[Size, Size]] = []
    row: Size = 0
    for rank in range(cut.count):
        for length, piece in zip(cut.segments, cut.pieces, strict=True):
            real = piece
            if isinstance(length, int):  # a symbolic one divides
                real = max(0, min(piece, length - rank * piece))
            if spans and same(spans[-1][1], row):
                spans[-1] = (spans[-1][0], row + real)
            elif not same(real, 0):
                spans.append((row, row + real))
            row = row + piece
    return spans
