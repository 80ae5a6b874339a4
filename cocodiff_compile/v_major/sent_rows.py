# SPDX-License-Identifier: Apache-2.0
"""Restricts what an attention computes to the tokens that are sent.

    Q, K   projections, norms and rotations of skipped tokens are not computed, unless the
           projection also serves something else
    O      attention over the queries of skipped tokens is not computed where O is reused

V is computed for all tokens, because it decides which tokens are sent. Tokens of different
projections, text and image for example, are streams. The number of rows sent of each stream is
known at compile time only if tokens are selected per stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch.fx import Graph, Node

from cocodiff_compile.cut.cut import Cut, CutUnknown, sizes_of
from cocodiff_compile.cut.rules import cut_of_operand
from cocodiff_compile.cut.selected_rows import (
    SelectedRows,
    SelectionPlan,
    blocks_before,
    flat_cut,
    multiply_rows,
    plan_selection,
    take_rows,
)
from cocodiff_compile.cut.view_rules import reshaped_cut
from cocodiff_compile.ir.aten import aten, bound, emit, matmul_operands, shape_of, value_of
from cocodiff_compile.ir.layout import static_size
from cocodiff_compile.ir.records import Leg, UlyssesSite
from cocodiff_compile.v_major.cached_exchange import CachedExchange, SentTokens

Quota: TypeAlias = "Callable[[int], int]"
"""Maps a number of tokens to the number of them that are sent."""
Streams: TypeAlias = "tuple[tuple[int, int], ...]"
"""(tokens, tokens sent) of each stream, in the order in which the streams follow each other."""


def plan_leg(leg: Leg, packed: Node, quota: Quota) -> SelectionPlan:
    """Plans how Q, K or V is packed of sent tokens only. Raises CutUnknown if it is unclear."""
    before, tokens = leg.exchange.token_rows or (0, 0)
    rows = {item.node: static_size(item.rows) or 0 for item in leg.projections}
    if not tokens or sum(rows.values()) % tokens:
        raise CutUnknown(f"projections of {leg.role.upper()} have other rows than tokens")
    batch = sum(rows.values()) // tokens
    begin = {}
    for node, size in rows.items():
        if node.target not in (aten.mm.default, aten.addmm.default) or size % batch:
            raise CutUnknown(f"{node.name} is no plain matmul")
        if node.target is aten.addmm.default and len(shape_of(bound(node)["self"])) > 1:
            raise CutUnknown(f"{node.name} adds a matrix")
        sent = quota(size // batch)
        begin[node] = Cut(0, batch, (sent, size // batch - sent), selected=sent)
    plan = plan_selection(begin, packed)
    if sum(plan.stream_rows) != tokens or blocks_before(plan) != before * leg.exchange.num_ranks:
        raise CutUnknown(f"where the tokens of {leg.role.upper()} lie is unclear")
    return plan


def streams_of(site: UlyssesSite, packed: Node) -> tuple[int, ...]:
    """Returns this rank's tokens per projection, in packed order. Raises CutUnknown if unclear."""
    return plan_leg(site.v, packed, lambda tokens: tokens).stream_rows


def plan_output(site: UlyssesSite, streams: Streams, query: Node, output: Node) -> SelectionPlan:
    """Plans how the packed rows of O are computed from the queries that are sent, if nothing else
    reads the other rows. It must be called before Q is rewritten. Raises CutUnknown if that is
    unclear.
    """
    assert site.q.exchange.token_rows is not None
    before, tokens = site.q.exchange.token_rows
    numel = value_of(query).numel()
    count = sum(sent for _, sent in streams)
    flat = flat_cut(count, before * site.q.exchange.num_ranks, tokens, numel)
    plan = plan_selection(
        {query: reshaped_cut(flat, (numel,), sizes_of(query), query.name)}, output
    )
    _refuse_other_readers(plan, site.o)
    for node, step in plan.rows.steps.items():
        for source in step.by_chunk:
            if source not in plan.rows.steps and cut_of_operand(node, source, step.cut):
                raise CutUnknown(f"{node.name} reads rows of {source.name} by their position")
    return plan


def _refuse_other_readers(plan: SelectionPlan, leg: Leg) -> None:
    """Raises CutUnknown if anything but the exchange of `leg` reads what would have fewer rows."""
    for node in plan.rows.steps:
        for user in node.users:
            is_sent = node is plan.end and user is leg.exchange.start
            if user not in plan.rows.steps and not is_sent:
                raise CutUnknown(f"{node.name} is read by {user.name} too")


@dataclass(frozen=True)
class SentRows:
    """Emits the computation of the rows that are sent of one attention."""

    graph: Graph
    tokens: SentTokens
    streams: Streams
    replaced: dict[Node, Node] = field(default_factory=dict)
    """Matmuls and attentions of all rows, mapped to their replacements of fewer rows."""
    _taken: dict[tuple[Node, int], Node] = field(default_factory=dict)
    _which: list[Node] = field(default_factory=list)

    def of_leg(self, leg: Leg, rewrite: CachedExchange) -> Node:
        """Returns the packed rows of sent tokens. Raises CutUnknown if these are unclear."""
        if any(item.is_fused for item in leg.projections):
            raise CutUnknown(f"{leg.role.upper()} is projected together with others")
        sent = dict(self.streams)
        plan = plan_leg(leg, rewrite.flat.source, lambda tokens: sent.get(tokens, 0))
        if plan.stream_rows != tuple(tokens for tokens, _ in self.streams):
            raise CutUnknown(f"{leg.role.upper()} has other streams than V")
        _refuse_other_readers(plan, leg)
        with self.graph.inserting_before(rewrite.flat.start):
            which = self._which_rows()
            given = {
                node: self._projected(node, plan.rows.steps[node].cut, which[index], index)
                for index, node in enumerate(plan.streams)
            }
            begins: tuple[Node | None, ...] = (*plan.streams, None)
            packed = self._emit(plan, given, dict(zip(begins, which, strict=True)))
            self.replaced.update(given)
            return packed

    def _which_rows(self) -> list[Node]:
        """Returns the sent rows of each stream, counted in it, then those of all, as [count]."""
        if not self._which:
            begin = first = 0
            for tokens, count in self.streams:
                part = self._call(aten.slice.Tensor, self.tokens.own, 1, first, first + count)
                part = self._call(aten.reshape.default, part, [count])
                self._which.append(self._call(aten.sub.Tensor, part, begin) if begin else part)
                begin, first = begin + tokens, first + count
            self._which.append(self._call(aten.reshape.default, self.tokens.own, [first]))
        return self._which

    def _projected(self, matmul: Node, cut: Cut, which: Node, stream: int) -> Node:
        left, _ = matmul_operands(matmul)
        if (left, stream) not in self._taken:
            self._taken[left, stream] = take_rows(self.graph, left, cut, which)
        return multiply_rows(self.graph, matmul, self._taken[left, stream])

    def of_output(self, plan: SelectionPlan, arrived: Node) -> Node:
        """Returns the packed rows of O, computed from the queries that `arrived`."""
        (query,) = plan.streams
        cut = plan.rows.steps[query].cut
        shape = list(sizes_of(query))
        shape[cut.dim] = int(cut.outer * cut.lengths[0])
        with self.graph.inserting_before(plan.end):
            rows = emit(self.graph, aten.reshape.default, arrived, shape, like=query)
            return self._emit(plan, {query: rows}, {})

    def _emit(
        self, plan: SelectionPlan, given: Mapping[Node, Node], which: Mapping[Node | None, Node]
    ) -> Node:
        rows = SelectedRows(self.graph, plan.rows.steps, which=which)
        packed = rows.emit_plan(plan, given)
        made = {node: chunks[0] for node, chunks in rows.chunks.items() if chunks[0] is not None}
        self.replaced.update({node: chunk for node, chunk in made.items() if node not in given})
        return packed

    def _call(self, target: Callable[..., object], source: Node, *args: object) -> Node:
        return emit(self.graph, target, source, *args, like=source)
