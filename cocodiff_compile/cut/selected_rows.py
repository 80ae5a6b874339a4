# SPDX-License-Identifier: Apache-2.0
"""Computes a part of a graph for some of its rows only: those that were selected.

Rows are followed as tokens are, in two chunks, those selected and the rest, of which only the first
is emitted. What is aligned with rows but not computed from them, a table of rotations say, is read
at the selected rows. Streams of rows that are joined on the way were selected from each on its own.

    [B*S, C] -> [B*s, C] -> projection, norm, rotation [B*s, C] -> packed, of s tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from cocodiff_compile.cut.checked_steps import step_tokens
from cocodiff_compile.cut.cut import Cut, CutPlan, CutUnknown, Step, numbers, sizes_of
from cocodiff_compile.cut.emit_chunks import EmitChunks
from cocodiff_compile.ir.aten import aten, bound, emit, matmul_operands


@dataclass(frozen=True)
class SelectionPlan:
    """Says how `end` is computed of selected rows of some nodes. `begin_of` tells for each node on
    the way from which of them its rows come; none where rows of all of them are joined, as in
    `streams`.
    """

    end: Node
    rows: CutPlan
    begin_of: Mapping[Node, Node | None]
    streams: tuple[Node, ...]

    @property
    def stream_rows(self) -> tuple[int, ...]:
        """Returns how many rows each of the joined streams has."""
        return numbers((self.rows.steps[node].cut.inner for node in self.streams), self.end)


def plan_selection(begin: Mapping[Node, Cut], end: Node) -> SelectionPlan:
    """Follows selected rows from `begin` to `end`. Raises CutUnknown if they cannot be followed."""
    steps = {node: Step(cut, ()) for node, cut in begin.items()}
    begin_of: dict[Node, Node | None] = {node: node for node in begin}
    streams = tuple(begin)
    for node in _between(begin, end):
        reads = {source: steps[source].cut for source in node.all_input_nodes if source in steps}
        if not reads:
            continue
        steps[node] = step_tokens(node, reads, frozenset())
        if missing := set(reads).difference(steps[node].by_chunk):
            raise CutUnknown(f"{node.name} reads all rows of {min(missing).name}")
        sources = list(dict.fromkeys(begin_of[source] for source in reads))
        begin_of[node] = sources[0] if len(sources) == 1 else None
        if len(sources) > 1:
            streams = _joined_streams(node, steps[node].cut, begin_of, len(begin))
    if end not in steps:
        raise CutUnknown(f"{end.name} has none of the rows")
    return SelectionPlan(end, CutPlan(steps, 2, {}), begin_of, streams)


def _between(begin: Mapping[Node, Cut], end: Node) -> list[Node]:
    """Returns all that `end` needs and that may need what begins, in graph order."""
    first = min(begin)
    found: set[Node] = {end}
    stack = [end]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source > first and source not in found and source not in begin:
                found.add(source)
                stack.append(source)
    return sorted(found)


def _joined_streams(
    node: Node, cut: Cut, begin_of: Mapping[Node, Node | None], count: int
) -> tuple[Node, ...]:
    """Returns the nodes whose rows a concatenation puts one behind the other."""
    is_joining = node.target is aten.cat.default
    if is_joining and bound(node)["dim"] % len(sizes_of(node)) == cut.dim:
        streams = [begin_of.get(item) for item in bound(node)["tensors"]]
        known = tuple(item for item in streams if item is not None)
        if len(known) == len(streams) == len(set(known)) == count:
            return known
    raise CutUnknown(f"{node.name} joins rows of different streams")


@dataclass
class SelectedRows(EmitChunks):
    """Emits a plan. `which` are the selected rows of each node that begins, [count], and under None
    those of all of them, joined.
    """

    which: Mapping[Node | None, Node] = field(default_factory=dict)
    _at: Node | None = None
    """The rows that are emitted."""

    def emit_plan(self, plan: SelectionPlan, given: Mapping[Node, Node]) -> Node:
        """Emits the selected rows of the end; `given` are those of the nodes that begin. Raises
        CutUnknown if an operand is read by row and it is unclear which rows were selected.
        """
        self.chunks.update({node: [rows, None] for node, rows in given.items()})
        for node in self.steps:
            if node not in given:
                self._at = self.which.get(plan.begin_of[node])
                self.emit(node, 0)
        return self.chunk(plan.end, 0)

    def part(self, whole: Node, cut: Cut, number: int) -> Node:
        """Emits the selected rows of a tensor that is there as a whole."""
        if self._at is None or sizes_of(self._at) != (cut.lengths[number],):
            raise CutUnknown(f"which rows of {whole.name} were selected is unclear")
        return take_rows(self.graph, whole, cut, self._at)


def take_rows(graph: Graph, whole: Node, cut: Cut, which: Node) -> Node:
    """Emits rows `which`, [count], of every block of `whole`."""
    sizes, (outer, *lengths) = sizes_of(whole), numbers((cut.outer, *cut.lengths), whole)
    before, after = sizes[: cut.dim], sizes[cut.dim + 1 :]
    blocks = [*before, outer, sum(lengths), *after]
    shown = emit(graph, aten.reshape.default, whole, blocks, like=whole)
    index = [*[None] * (cut.dim + 1), which]
    taken = emit(graph, aten.index.Tensor, shown, index, like=whole)
    rows = [*before, outer * sizes_of(which)[0], *after]
    return emit(graph, aten.reshape.default, taken, rows, like=whole)


def multiply_rows(graph: Graph, matmul: Node, left: Node) -> Node:
    """Emits `matmul` for other rows than those of its left operand."""
    old, _ = matmul_operands(matmul)
    args = torch.fx.node.map_arg(matmul.args, lambda arg: left if arg is old else arg)
    assert callable(matmul.target)
    return emit(graph, matmul.target, *args, like=matmul, **matmul.kwargs)


def flat_cut(count: int, before: int, tokens: int, numel: int) -> Cut:
    """Returns the cut of a flat message [before, tokens, behind] with `count` selected tokens."""
    behind = numel // (before * tokens)
    return Cut(0, before, (count * behind, (tokens - count) * behind), selected=count)


def blocks_before(plan: SelectionPlan) -> int:
    """Returns how many blocks of rows the end is made of, one behind the other in memory."""
    cut = plan.rows.steps[plan.end].cut
    return math.prod(numbers((*sizes_of(plan.end)[: cut.dim], cut.outer), plan.end))
