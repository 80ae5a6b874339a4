"""Part of a graph, computed for some of its rows only: those that were picked.

Rows are followed as in `row_cut`, in two runs, those picked and the rest, of which only the first
is emitted. What is aligned with rows but not computed from them, a table of rotations say, is read
at the picked rows. Streams of rows that are joined on the way were picked from each on its own.

    [B*S, C] -> [B*s, C] -> projection, norm, rotation [B*s, C] -> packed, of s tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from cocodiff_compile.cut.head_cut import CutUnknown
from cocodiff_compile.cut.row_cut import RowCut, RowPlan, RowStep, sizes_of, step_rows
from cocodiff_compile.cut.row_runs import RowRuns
from cocodiff_compile.ir.aten import (
    SLICING,
    aten,
    bound,
    emit,
    is_tensor,
    matmul_operands,
)


@dataclass(frozen=True)
class PickPlan:
    """How `end` is computed of picked rows of some nodes. `begin_of` tells for each node on the way
    from which of them its rows come; none where rows of all of them are joined, as in `streams`.
    """

    end: Node
    rows: RowPlan
    begin_of: Mapping[Node, Node | None]
    streams: tuple[Node, ...]

    @property
    def stream_rows(self) -> tuple[int, ...]:
        """How many rows each of the joined streams has."""
        return tuple(self.rows.steps[node].cut.rows for node in self.streams)


def plan_picked(begin: Mapping[Node, RowCut], end: Node) -> PickPlan:
    """From nodes whose rows are cut into picked ones and the rest; CutUnknown if rows cannot be
    followed to `end`.
    """
    steps = {node: RowStep(cut, ()) for node, cut in begin.items()}
    begin_of: dict[Node, Node | None] = {node: node for node in begin}
    streams = tuple(begin)
    for node in _between(begin, end):
        reads = {source: steps[source].cut for source in node.all_input_nodes if source in steps}
        if not reads:
            continue
        steps[node] = step_rows(node, reads, frozenset())
        if missing := set(reads).difference(steps[node].by_run):
            raise CutUnknown(f"{node.name} reads all rows of {min(missing).name}")
        sources = list(dict.fromkeys(begin_of[source] for source in reads))
        begin_of[node] = sources[0] if len(sources) == 1 else None
        if len(sources) > 1:
            streams = _joined_streams(node, steps[node].cut, begin_of, len(begin))
    if end not in steps:
        raise CutUnknown(f"{end.name} has none of the rows")
    return PickPlan(end, RowPlan(steps, 2, {}), begin_of, streams)


def _between(begin: Mapping[Node, RowCut], end: Node) -> list[Node]:
    """All that `end` needs and that may need what begins, in graph order."""
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
    node: Node, cut: RowCut, begin_of: Mapping[Node, Node | None], count: int
) -> tuple[Node, ...]:
    """Which begins' rows a concatenation puts one behind the other."""
    is_joining = node.target is aten.cat.default
    if is_joining and bound(node)["dim"] % len(sizes_of(node)) == cut.dim:
        streams = [begin_of.get(item) for item in bound(node)["tensors"]]
        known = tuple(item for item in streams if item is not None)
        if len(known) == len(streams) == len(set(known)) == count:
            return known
    raise CutUnknown(f"{node.name} joins rows of different streams")


@dataclass
class PickedRows(RowRuns):
    """Emits a plan. `which` are the picked rows of each begin, [count], and under None those of all
    of them, joined.
    """

    which: Mapping[Node | None, Node] = field(default_factory=dict)
    _at: Node | None = None
    """The rows that what is emitted has."""

    def emit(self, picks: PickPlan, given: Mapping[Node, Node]) -> Node:
        """What stands for the picked rows of the end; `given` are those of the begins."""
        self.runs.update({node: [rows, None] for node, rows in given.items()})
        for node in self.plan.steps:
            if node in given:
                continue
            self._at = self.which.get(picks.begin_of[node])
            is_several = node.target in SLICING and not is_tensor(node)
            self.runs[node] = [None if is_several else self._run_of(node, 0), None]
        return self._existing(picks.end, 0)

    def _part(self, whole: Node, cut: RowCut, number: int) -> Node:
        if self._at is None or sizes_of(self._at) != (cut.lengths[number],):
            raise CutUnknown(f"which rows of {whole.name} were picked is unclear")
        return take_rows(self.graph, whole, cut, self._at)


def take_rows(graph: Graph, whole: Node, cut: RowCut, which: Node) -> Node:
    """Rows `which`, [count], of every block of `whole`."""
    sizes = sizes_of(whole)
    before, after = sizes[: cut.dim], sizes[cut.dim + 1 :]
    blocks = [*before, cut.outer, cut.rows, *after]
    shown = emit(graph, aten.reshape.default, whole, blocks, like=whole)
    index = [*[None] * (cut.dim + 1), which]
    taken = emit(graph, aten.index.Tensor, shown, index, like=whole)
    rows = [*before, cut.outer * sizes_of(which)[0], *after]
    return emit(graph, aten.reshape.default, taken, rows, like=whole)


def multiply_rows(graph: Graph, matmul: Node, left: Node) -> Node:
    """What `matmul` gives for other rows than those of its left operand."""
    old, _ = matmul_operands(matmul)
    args = torch.fx.node.map_arg(matmul.args, lambda arg: left if arg is old else arg)
    assert callable(matmul.target)
    return emit(graph, matmul.target, *args, like=matmul, **matmul.kwargs)


def flat_cut(count: int, before: int, tokens: int, numel: int) -> RowCut:
    """Of a message [before, tokens, behind] as one dim, `count` tokens of which are picked."""
    behind = numel // (before * tokens)
    return RowCut(0, before, (count * behind, (tokens - count) * behind), picked=count)


def blocks_before(plan: PickPlan) -> int:
    """How many blocks of rows the end is made of, one behind the other in memory."""
    cut = plan.rows.steps[plan.end].cut
    return math.prod(sizes_of(plan.end)[: cut.dim]) * cut.outer
