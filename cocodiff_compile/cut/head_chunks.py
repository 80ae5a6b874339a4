"""Emits nodes of a graph chunk of heads by chunk, as the cuts of `head_cut` say.

A chunk of a node reads its chunk of each input that is cut, its part of what has a dim of heads
beside that, and all of the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.cut.head_cut import SQUEEZE, CutUnknown, HeadCut, squeezed, step_cut
from cocodiff_compile.cut.joining import emit_joined
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    BATCHED_MATMUL,
    aten,
    bound,
    emit,
    emit_contiguous,
    emit_shape,
    is_concatenation,
    is_pointwise,
    is_tensor,
    shape_of,
)
from cocodiff_compile.ir.attention_ops import FUSED_ATTENTION
from cocodiff_compile.ir.layout import known, same

Outside = Mapping[tuple[Node, Node], HeadCut]
"""By a node and what it reads from elsewhere: that one's cut, if it holds heads."""


def common_cut(node: Node, cuts: Mapping[Node, HeadCut], count: int) -> HeadCut:
    """Returns the cut of a node, on which all of its inputs must agree."""
    inputs = [source for source in node.all_input_nodes if source in cuts]
    found = [step_cut(cuts[source], source, node, count) for source in inputs]
    if any(cut.dim != found[0].dim or not same(cut.outer, found[0].outer) for cut in found):
        raise CutUnknown(f"{node.name} joins tensors whose heads lie in different places")
    return found[0]


def cuts_outside(node: Node, cuts: Mapping[Node, HeadCut]) -> Outside:
    """Returns the cuts of the operands that come from elsewhere and have a part for each head."""
    reads_heads = (
        is_pointwise(node)
        or is_concatenation(node)
        or node.target in FUSED_ATTENTION
        or node.target in BATCHED_MATMUL
    )
    if not reads_heads:
        return {}
    inside = next(source for source in node.all_input_nodes if source in cuts)
    cut, shape = cuts[inside], shape_of(inside)
    found: dict[tuple[Node, Node], HeadCut] = {}
    for source in node.all_input_nodes:
        if source in cuts or not is_tensor(source):
            continue
        dim = cut.dim + len(shape_of(source)) - len(shape)
        if dim < 0 or same(shape_of(source)[dim], 1):
            continue
        if not same(shape_of(source)[dim], shape[cut.dim]):
            raise CutUnknown(f"{node.name} reads {source.name}, whose heads are unclear")
        found[node, source] = HeadCut(dim, cut.outer)
        refuse_unknown_sizes(source, found[node, source])
    return found


def refuse_unknown_sizes(node: Node, cut: HeadCut) -> None:
    """Raises CutUnknown if both sizes of [outer, heads] are symbolic; one may be."""
    size = shape_of(node)[cut.dim]
    if known(cut.outer) is None and known(size // cut.outer) is None:
        raise CutUnknown(f"{node.name} has two symbolic sizes around its heads")


@dataclass
class HeadChunks:
    """Emits `count` chunks of nodes whose cuts are given."""

    graph: Graph
    count: int
    cuts: Mapping[Node, HeadCut]
    outside: Outside
    copies: list[dict[Node, Node]] = field(init=False)
    """By chunk: the copy of each node that was emitted."""

    def __post_init__(self) -> None:
        self.copies = [{} for _ in range(self.count)]

    def copy_all(self, nodes: Iterable[Node], chunk: int) -> None:
        copies = self.copies[chunk]
        for node in nodes:
            inputs = {
                source: copies[source] if source in copies else self._whole(node, source, chunk)
                for source in node.all_input_nodes
            }
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
            target: Any = node.target
            if target is ALL_TO_ALL:
                copies[node] = self.exchange(node, copies[bound(node)["input"]])
                continue
            if target in _SIZED:
                args = self._with_fewer_heads(node, args)
                target = target if target is aten.expand.default else aten.reshape.default
            elif target in SQUEEZE:
                target, args = aten.squeeze.dims, (args[0], squeezed(node))
            like = node if is_tensor(node) else next(filter(is_tensor, inputs))
            copies[node] = emit(self.graph, target, *args, like=like, **kwargs)

    def exchange(self, start: Node, source: Node) -> Node:
        """Emits the exchange that `start` is, for one chunk of what it sends."""
        arguments = bound(start)
        splits = arguments["input_split_sizes"]
        if self.cuts[start].dim == 0:
            splits = [self._divided(split, source) for split in splits]
        source = emit_contiguous(self.graph, source)
        return emit(
            self.graph, ALL_TO_ALL, source, splits, splits, arguments["group_name"], like=source
        )

    def _whole(self, node: Node, source: Node, chunk: int) -> Node:
        """Returns all of an operand from elsewhere, or its part for the heads of this chunk."""
        cut = self.outside.get((node, source))
        return source if cut is None else self.part(source, cut, chunk)

    def _with_fewer_heads(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments of a reshape with a chunk's size in the dim of the heads."""
        dim, sizes = self.cuts[node].dim, list(args[1])
        sizes[dim] = self._divided(sizes[dim], args[0])
        return (args[0], sizes, *args[2:])

    def _divided(self, size: int | Node, like: Node) -> int | Node:
        if isinstance(size, Node):
            return emit(self.graph, operator.floordiv, size, self.count, like=like)
        return size if size == -1 else size // self.count

    def part(self, whole: Node, cut: HeadCut, chunk: int) -> Node:
        """Emits a tensor of the elements of one chunk."""
        graph, count = self.graph, self.count
        shape = emit_shape(graph, whole)
        before, after = shape[: cut.dim], shape[cut.dim + 1 :]
        outer, heads = known(cut.outer), known(shape_of(whole)[cut.dim] // cut.outer)
        sizes = [-1 if outer is None else outer, count, -1 if heads is None else heads // count]
        viewed = emit(graph, aten.view.default, whole, [*before, *sizes, *after], like=whole)
        picked = emit(graph, aten.select.int, viewed, cut.dim + 1, chunk, like=whole)
        if same(cut.outer, 1):
            return emit(graph, aten.squeeze.dim, picked, cut.dim, like=whole)
        picked = emit_contiguous(graph, picked)
        return emit(graph, aten.view.default, picked, [*before, -1, *after], like=whole)

    def join(self, whole: Node) -> Node:
        """Emits `whole`, joined from all chunks."""
        cut = self.cuts[whole]
        parts = [copies[whole] for copies in self.copies]
        return emit_joined(self.graph, parts, cut.dim, cut.outer, whole)


_SIZED = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
    }
)
"""Ops whose second argument is a shape."""
