"""Emits nodes of a graph run by run, as a plan of where the runs of rows lie says.

A run of a node reads its run of each input that is cut, its part of what is aligned with rows, and
all of the rest.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.cut.joining import emit_joined
from cocodiff_compile.cut.row_cut import (
    RowCut,
    RowPlan,
    joined_lengths,
    run_of_operand,
    sizes_of,
    taken_rows,
)
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    RESHAPE,
    SLICING,
    aten,
    bound,
    emit,
    emit_contiguous,
    is_tensor,
)


@dataclass
class RowRuns:
    graph: Graph
    plan: RowPlan
    runs: dict[Node, list[Node | None]] = field(default_factory=dict)
    """What stands for each run of a node that is cut; none for one without rows."""
    joined: dict[Node, Node] = field(default_factory=dict)

    def _runs_of(self, node: Node) -> list[Node | None]:
        lengths = self.plan.steps[node].cut.lengths
        if node.target in SLICING and not is_tensor(node):
            return [None] * len(lengths)  # what picks its results takes them from its input
        return [self._run_of(node, n) if lengths[n] else None for n in range(len(lengths))]

    def _run_of(self, node: Node, number: int) -> Node:
        step = self.plan.steps[node]
        slicing = node.all_input_nodes[0] if node.target is operator.getitem else node
        if slicing.target in SLICING:
            return self._slice(slicing, node, number)
        if (
            node.target is aten.cat.default
            and bound(node)["dim"] % len(sizes_of(node)) == step.cut.dim
        ):
            return self._joined_run(node, number)
        inputs = {source: self._input(node, source, number) for source in node.all_input_nodes}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        target: Any = node.target
        size = step.cut.outer * step.cut.lengths[number]
        if target is ALL_TO_ALL:
            return self._exchange(args, step.cut, size)
        if target in RESHAPE or target is aten.expand.default:
            sizes = list(sizes_of(node))
            args = (args[0], [*sizes[: step.cut.dim], size, *sizes[step.cut.dim + 1 :]])
            target, kwargs = aten.reshape.default if target in RESHAPE else target, {}
        like = node if is_tensor(node) else next(filter(is_tensor, inputs))
        return emit(self.graph, target, *args, like=like, **kwargs)

    def _exchange(self, args: tuple[Any, ...], cut: RowCut, size: int) -> Node:
        source, _, splits, group = args
        if cut.dim == 0:
            splits = [size // len(splits)] * len(splits)
        source = emit_contiguous(self.graph, source)
        return emit(self.graph, ALL_TO_ALL, source, splits, splits, group, like=source)

    def _slice(self, slicing: Node, node: Node, number: int) -> Node:
        """The part of a run that a slice, or one result of a split, takes."""
        whole: Node = bound(slicing)["self"]
        run = self._existing(whole, number)
        cut = self.plan.steps[whole].cut
        dim = bound(slicing)["dim"] % len(sizes_of(whole))
        if slicing is node and dim != cut.dim:
            assert callable(node.target)
            return emit(self.graph, node.target, run, *node.args[1:], like=node, **node.kwargs)
        begin, end = taken_rows(slicing, node)
        if slicing.target is aten.unbind.int:
            return emit(self.graph, aten.select.int, run, dim, begin, like=node)
        if dim == cut.dim:
            first, last = cut.run(number)
            if cut.outer == 1:
                begin, end = max(begin, first) - first, min(end, last) - first
            else:
                begin, end = 0, cut.outer * (last - first)
        return emit(self.graph, aten.slice.Tensor, run, dim, begin, end, like=node)

    def _joined_run(self, node: Node, number: int) -> Node:
        tensors = bound(node)["tensors"]
        cuts = {item: self.plan.steps[item].cut for item in tensors if item in self.plan.steps}
        parts = []
        for item, lengths in zip(tensors, joined_lengths(node, tensors, cuts), strict=True):
            if lengths[number]:
                parts.append(self._existing(item, number) if item in cuts else item)
        if len(parts) == 1:
            return parts[0]
        dim = self.plan.steps[node].cut.dim
        return emit(self.graph, aten.cat.default, parts, dim, like=node)

    def _input(self, node: Node, source: Node, number: int) -> Node:
        """What a run of a node reads: its run of an input, or all of it."""
        step = self.plan.steps[node]
        if source not in step.by_run:
            return self._whole(source) if source in self.plan.steps else source
        if source in self.plan.steps:
            return self._existing(source, number)
        cut = run_of_operand(node, source, step.cut)
        return source if cut is None else self._part(source, cut, number)

    def _existing(self, node: Node, number: int) -> Node:
        found = self.runs[node][number]
        assert found is not None, f"{node.name} has no rows in run {number}"
        return found

    def _part(self, whole: Node, cut: RowCut, number: int) -> Node:
        begin, end = cut.run(number)
        if cut.outer == 1:
            return emit(self.graph, aten.slice.Tensor, whole, cut.dim, begin, end, like=whole)
        sizes = sizes_of(whole)
        before, after = sizes[: cut.dim], sizes[cut.dim + 1 :]
        blocks = [*before, cut.outer, cut.rows, *after]
        shown = emit(self.graph, aten.reshape.default, whole, blocks, like=whole)
        part = emit(self.graph, aten.slice.Tensor, shown, cut.dim + 1, begin, end, like=whole)
        rows = [*before, cut.outer * (end - begin), *after]
        return emit(self.graph, aten.reshape.default, part, rows, like=whole)

    def _whole(self, node: Node) -> Node:
        """All runs of a node, joined once."""
        if node not in self.joined:
            self.joined[node] = self._join(node)
        return self.joined[node]

    def _join(self, node: Node) -> Node:
        if node.target in SLICING and not is_tensor(node):
            source = node.all_input_nodes[0]
            assert callable(node.target)
            whole = self._whole(source)
            return emit(self.graph, node.target, whole, *node.args[1:], like=source, **node.kwargs)
        cut = self.plan.steps[node].cut
        parts = [run for run in self.runs[node] if run is not None]
        if len(parts) == 1:
            return parts[0]
        return emit_joined(self.graph, parts, cut.dim, cut.outer, node)
