# SPDX-License-Identifier: Apache-2.0
"""Spreads cuts over a graph, from its shared inputs and the tokens of its attentions, in both
directions.

The first cut that reaches a node wins. Where another one agrees with it but for its segments, both
are refined: text and image of a joint sequence are shared out one by one. A cut only proposes; what
two nodes disagree on costs a gather, never a value.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress

from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.cut.rules import step_cut
from cocodiff_compile.cut.view_rules import taken_range, written_range
from cocodiff_compile.ir.aten import (
    SLICING,
    aten,
    attention_operands,
    bound,
    is_tensor,
    parse_fused_attention,
    shape_of,
)
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.layout import Size, divides, in_order, index_of, same
from cocodiff_compile.shard.wanted_cuts import slicing_of, wanted_cuts
from cocodiff_compile.shard.whole_of_shares import WHOLE, whole_cut


def spread(graph: Graph, group: str, num_ranks: int) -> dict[Node, Cut]:
    """Returns the cut that is proposed for each node that tokens were followed to, between the
    ranks of a group.
    """
    spreading = _Spreading()
    for node in graph.find_nodes(op="call_function", target=WHOLE):
        if is_of_group(node, group, num_ranks):
            spreading.push(node, whole_cut(bound(node)))
    spreading.run()
    attentions = [node for node in graph.nodes if is_attention(node.target)]
    for node in sorted(attentions, key=_query_size, reverse=True):
        attention = parse_fused_attention(node)
        if attention.query not in spreading.proposed and attention.op.layout.startswith("B"):
            dim = attention.op.token_dim
            segments = _segments(graph, shape_of(attention.query)[dim], num_ranks)
            with suppress(CutUnknown):
                spreading.push(attention.query, Cut.over_ranks(dim, 1, segments, num_ranks))
            spreading.run()
    return spreading.proposed


def _segments(graph: Graph, tokens: Size, num_ranks: int) -> tuple[Size, ...]:
    """Returns what tokens are shared out one by one. A symbolic number of them may divide by the
    ranks in parts only: in those that a concatenation joins.
    """
    if isinstance(tokens, int) or divides(num_ranks, tokens):
        return (tokens,)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        dim = bound(node)["dim"] % len(shape_of(node))
        if same(shape_of(node)[dim], tokens):
            return tuple(shape_of(item)[dim] for item in bound(node)["tensors"])
    return (tokens,)


def is_of_group(whole: Node, group: str, num_ranks: int) -> bool:
    """Returns whether the ranks of this group hold the shares of a whole, in this order."""
    arguments = bound(whole)
    return (arguments["group"], arguments["num_ranks"]) == (group, num_ranks)


def _query_size(node: Node) -> int:
    query, key, _ = attention_operands(node)
    sizes = (*shape_of(query), *shape_of(key))
    return math.prod(map(optimization_hint, sizes))


class _Spreading:
    def __init__(self) -> None:
        self.proposed: dict[Node, Cut] = {}
        self._queue: deque[Node] = deque()

    def run(self) -> None:
        while self._queue:
            node = self._queue.popleft()
            for other, cut in itertools.chain(self._operands(node), self._users(node)):
                self.push(other, cut)

    def push(self, node: Node, cut: Cut) -> None:
        """Proposes a cut of a node, or refines the one that was proposed."""
        if optimization_hint(cut.inner) < 2:
            return
        known = self.proposed.get(node)
        if known is not None:
            is_same_place = known.dim == cut.dim and same(known.outer, cut.outer)
            if not (is_same_place and same(known.inner, cut.inner)):
                return
            cut = refined(known, itertools.accumulate(cut.segments))
            if cut.is_like(known):
                return
        self.proposed[node] = cut
        self._queue.append(node)

    def _operands(self, node: Node) -> Iterator[tuple[Node, Cut]]:
        cut = self.proposed[node]
        if is_attention(node.target):
            attention = parse_fused_attention(node)
            if cut.dim == attention.op.token_dim:
                yield attention.query, cut
            elif cut.dim == 0:
                yield from dict.fromkeys(attention_operands(node), cut).items()
        elif node.op == "call_function":
            try:
                yield from wanted_cuts(node, cut).items()
            except CutUnknown:
                return

    def _users(self, node: Node) -> Iterator[tuple[Node, Cut]]:
        for user in node.users:
            if user.target in SLICING and not is_tensor(user):
                for part in user.users:
                    yield from self._behind(part, node)
            elif user.op == "call_function":
                yield from self._behind(user, node)

    def _behind(self, user: Node, node: Node) -> Iterator[tuple[Node, Cut]]:
        """Yields the cut of what reads a node; a slice also says where segments begin and end."""
        cut = self.proposed[node]
        slicing = slicing_of(user)
        try:
            if _writes_rows(user, cut):
                yield user, _around_written(user, node, cut)
                return
            if is_attention(user.target):
                if _keeps_rows(user, node, cut):
                    yield user, cut
                return
            if slicing is not None and _takes_part(slicing, user, cut):
                begin, end = taken_range(slicing, user)
                cut = refined(cut, (begin, end))
                yield node, cut
            operand = user.all_input_nodes[0] if slicing is not None else node
            yield user, step_cut(user, {operand: cut}).cut
        except CutUnknown:
            return


def _keeps_rows(attention: Node, operand: Node, cut: Cut) -> bool:
    parsed = parse_fused_attention(attention)
    return operand is parsed.query and cut.dim in (0, parsed.op.token_dim)


def _writes_rows(node: Node, cut: Cut) -> bool:
    """Returns whether a node writes some rows of the dim that is cut."""
    if node.target is not aten.slice_scatter.default or not same(cut.outer, 1):
        return False
    dim: int = bound(node)["dim"] % len(shape_of(node))
    return dim == cut.dim


def _around_written(node: Node, operand: Node, cut: Cut) -> Cut:
    """Returns the cut of what rows are written into: segments also end where the rows do."""
    begin, end = written_range(node)
    if operand is bound(node)["self"]:
        return refined(cut, (begin, end))
    around = (begin, *cut.segments, shape_of(node)[cut.dim] - end)
    return cut.with_segments([length for length in around if not same(length, 0)])


def _takes_part(slicing: Node, node: Node, cut: Cut) -> bool:
    """Returns whether a slice takes some rows of the dim that is cut."""
    dim = bound(slicing)["dim"] % len(shape_of(bound(slicing)["self"]))
    is_row = len(shape_of(node)) != len(shape_of(bound(slicing)["self"]))
    return dim == cut.dim and not is_row and same(cut.outer, 1)


def refined(cut: Cut, places: Iterable[Size]) -> Cut:
    """Returns a cut whose segments also end at these places of a block, where that is possible."""
    bounds = in_order((0, cut.inner, *itertools.accumulate(cut.segments), *places))
    if bounds is None:
        return cut
    first, last = index_of(bounds, 0), index_of(bounds, cut.inner)
    assert first is not None and last is not None
    inside = bounds[first : last + 1]
    try:
        return cut.with_segments([stop - place for place, stop in itertools.pairwise(inside)])
    except CutUnknown:
        return cut
