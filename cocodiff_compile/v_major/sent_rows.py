"""What of an attention need not be computed where some tokens are not sent.

    Q, K   projections, norms and rotations of tokens that are not sent, unless a projection makes
           other things too
    O      attention over the queries of such tokens, where its result is taken from memory

V is computed of all tokens: it tells which ones are sent. Tokens of several projections, text and
image say, are streams; which rows of each are sent is known beforehand only if they are chosen from
each stream on its own.
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
from cocodiff_compile.ir.layout import known
from cocodiff_compile.ir.records import Leg, UlyssesSite
from cocodiff_compile.v_major.remembered_exchange import RememberedExchange, SentTokens

Quota: TypeAlias = "Callable[[int], int]"
"""How many of so many tokens are sent."""
Streams: TypeAlias = "tuple[tuple[int, int], ...]"
"""(tokens, those that are sent), one stream behind the other."""


def plan_leg(leg: Leg, packed: Node, quota: Quota) -> SelectionPlan:
    """How what is packed of Q, K or V is computed of sent tokens; CutUnknown if it is unclear."""
    before, tokens = leg.exchange.token_rows or (0, 0)
    rows = {item.node: known(item.rows) or 0 for item in leg.projections}
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
    """Tokens of a rank by projection, as they lie one behind the other; CutUnknown if unclear."""
    return plan_leg(site.v, packed, lambda tokens: tokens).stream_rows


def plan_output(site: UlyssesSite, streams: Streams, query: Node, output: Node) -> SelectionPlan:
    """How what is packed of O is computed of queries that are sent, if nothing else needs those of
    the others; before Q is rewritten. CutUnknown if it cannot be told.
    """
    assert site.q.exchange.token_rows is not None
    before, tokens = site.q.exchange.token_rows
    numel = value_of(query).numel()
    count = sum(sent for _, sent in streams)
    flat = flat_cut(count, before * site.q.exchange.num_ranks, tokens, numel)
    plan = plan_selection({query: reshaped_cut(flat, (numel,), sizes_of(query), query)}, output)
    _refuse_other_readers(plan, site.o)
    for node, step in plan.rows.steps.items():
        for source in step.by_chunk:
            if source not in plan.rows.steps and cut_of_operand(node, source, step.cut):
                raise CutUnknown(f"{node.name} reads rows of {source.name} by their place")
    return plan


def _refuse_other_readers(plan: SelectionPlan, leg: Leg) -> None:
    """All that is computed of fewer rows must be for the exchange of `leg` alone."""
    for node in plan.rows.steps:
        for user in node.users:
            is_sent = node is plan.end and user is leg.exchange.start
            if user not in plan.rows.steps and not is_sent:
                raise CutUnknown(f"{node.name} is read by {user.name} too")


@dataclass(frozen=True)
class SentRows:
    """Computes what is sent of one attention."""

    graph: Graph
    tokens: SentTokens
    streams: Streams
    replaced: dict[Node, Node] = field(default_factory=dict)
    """By what they stand for: matmuls and attentions of fewer rows."""
    _taken: dict[tuple[Node, int], Node] = field(default_factory=dict)
    _which: list[Node] = field(default_factory=list)

    def of_leg(self, leg: Leg, rewrite: RememberedExchange) -> Node:
        """What is packed of tokens that are sent; CutUnknown if it cannot be told."""
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
                node: self._projected(node, plan.rows.steps[node].cut, which[place], place)
                for place, node in enumerate(plan.streams)
            }
            begins: tuple[Node | None, ...] = (*plan.streams, None)
            packed = self._emit(plan, given, dict(zip(begins, which, strict=True)))
            self.replaced.update(given)
            return packed

    def _which_rows(self) -> list[Node]:
        """Of each stream, counted from its beginning, and of all of them: [count]."""
        if not self._which:
            begin = first = 0
            for tokens, count in self.streams:
                part = self._call(aten.slice.Tensor, self.tokens.own, 1, first, first + count)
                part = self._call(aten.reshape.default, part, [count])
                self._which.append(self._call(aten.sub.Tensor, part, begin) if begin else part)
                begin, first = begin + tokens, first + count
            self._which.append(self._call(aten.reshape.default, self.tokens.own, [first]))
        return self._which

    def _projected(self, matmul: Node, cut: Cut, which: Node, place: int) -> Node:
        left, _ = matmul_operands(matmul)
        if (left, place) not in self._taken:
            self._taken[left, place] = take_rows(self.graph, left, cut, which)
        return multiply_rows(self.graph, matmul, self._taken[left, place])

    def of_output(self, plan: SelectionPlan, arrived: Node) -> Node:
        """What is packed of O, computed of the queries that `arrived`."""
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
        found = rows.emit_plan(plan, given)
        made = {node: chunks[0] for node, chunks in rows.chunks.items() if chunks[0] is not None}
        self.replaced.update({node: chunk for node, chunk in made.items() if node not in given})
        return found

    def _call(self, target: Callable[..., object], source: Node, *args: object) -> Node:
        return emit(self.graph, target, source, *args, like=source)
