# SPDX-License-Identifier: Apache-2.0
"""chunk-tokens: run what lies between attentions per chunk of this rank's tokens.

Needs     recognised sites, in chunks of heads or not; in how many chunks tokens are to be cut.
Rewrites  the queries of every attention, and all that is computed row by row from there on:
          output exchanges, projections, norms, MLPs, the next attention's input exchanges. Keys and
          values are joined again in front of their attention.
Keeps     every value: rows do not see each other in any of this. Bit for bit where the library
          that multiplies computes a row alike whatever stands beside it, as on CPU. As many bytes
          are sent as before, in more messages.
Declines  a site whose tokens cannot be followed from its queries through its output exchange,
          through ops that the table of `cut/rules.py` lists.

    exchange -> [S, C] -> projection, norm, MLP [S, C] -> exchange
    n times:    [s, C] -> projection, norm, MLP [s, C] -> exchange: one chunk computes while others
    are sent
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from cocodiff_compile.cut.checked_steps import step_tokens
from cocodiff_compile.cut.cut import Cut, CutPlan, CutUnknown, Step, numbers, sizes_of
from cocodiff_compile.cut.emit_chunks import EmitChunks
from cocodiff_compile.ir.aten import FusedAttention, aten, bound, parse_fused_attention
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import (
    Declined,
    Exchange,
    Leg,
    Projection,
    Recognition,
    UlyssesSite,
)


def plan_tokens(graph: Graph, sites: Sequence[UlyssesSite], count: int) -> CutPlan:
    """Follows chunks of tokens from the queries of `sites` through the graph."""
    seeds = {
        node: site for site in sites for node in site.attention.nodes if is_attention(node.target)
    }
    exchanges = frozenset(piece.start for site in sites for piece in site.pieces)
    cuts: dict[Node, Cut] = {}
    steps: dict[Node, Step] = {}
    stopped: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reads = {source: cuts[source] for source in node.all_input_nodes if source in cuts}
        try:
            if node in seeds and (seed := parse_fused_attention(node)).query not in cuts:
                reads[seed.query] = _first_cut(seed, seeds[node], count)
            if not reads:
                continue
            if any(user.target is aten.as_strided.default for user in node.users):
                raise CutUnknown(f"{node.name} is read by its place in memory")
            steps[node] = step_tokens(node, reads, exchanges)
            cuts[node] = steps[node].cut
        except CutUnknown as unknown:
            stopped[node] = str(unknown)
    return CutPlan(steps, count, stopped)


def _first_cut(attention: FusedAttention, site: UlyssesSite, count: int) -> Cut:
    num_ranks, dim = site.o.exchange.num_ranks, attention.op.token_dim
    all_tokens = sizes_of(attention.query)[dim]
    tokens, rest = divmod(all_tokens, num_ranks)
    if rest or tokens < count:
        raise CutUnknown(f"{all_tokens} tokens of {num_ranks} ranks")
    length, rest = divmod(tokens, count)
    return Cut(dim, num_ranks, tuple(length + (number < rest) for number in range(count)))


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of a rank in `chunks` chunks, from the attentions at these places of the
    recognition on; None: from all that can be cut.
    """

    chunks: int
    attentions: tuple[int, ...] | None = None
    name: str = "chunk-tokens"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:
        if self.attentions is None:
            plan, declined = plan_cuttable(graph, recognition.sites, self.chunks)
        else:
            sites = [recognition.sites[place] for place in self.attentions]
            plan, declined = plan_tokens(graph, sites, self.chunks), ()
        return replace(chunk_tokens(graph, recognition, plan), declined=declined)


def chunk_tokens(graph: Graph, recognition: Recognition, plan: CutPlan) -> PassResult:
    """Rewrites the graph so that what is in the plan is computed chunk by chunk."""
    if not plan.steps:
        return PassResult(False)
    made = _Rewrite(graph, plan.steps).run()
    graph.eliminate_dead_code()
    sites = tuple(map(made.site, recognition.sites))
    cut = sum(
        site.attention != old.attention for site, old in zip(sites, recognition.sites, strict=True)
    )
    note = f"tokens of {cut} attentions in {plan.count} chunks"
    return PassResult(True, replace(recognition, sites=sites), notes=(note,))


def plan_cuttable(
    graph: Graph, sites: Sequence[UlyssesSite], count: int
) -> tuple[CutPlan, tuple[Declined, ...]]:
    """Returns the plan for all sites whose chunks reach their output exchange. Declines others."""
    plan = plan_tokens(graph, sites, count)
    declined = {}
    for site in sites:
        if not all(piece.start in plan.steps for piece in site.o.exchange.pieces):
            reasons = (plan.stopped.get(node) for node in _behind(site))
            reason = next(filter(None, reasons), "its attention is not one op")
            declined[site.index] = Declined(
                site.attention.output, f"its tokens cannot be cut: {reason}", site.module_path
            )
    if declined:
        able = [site for site in sites if site.index not in declined]
        plan = plan_tokens(graph, able, count)
    return plan, tuple(declined.values())


def _behind(site: UlyssesSite) -> Iterable[Node]:
    """Returns the nodes from the attention to the output exchange, in graph order."""
    ends = {piece.start for piece in site.o.exchange.pieces}
    found = dict.fromkeys(site.attention.nodes)
    stack = list(found)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found[user] = None
                if user not in ends:
                    stack.append(user)
    return sorted(found)


class _Rewrite(EmitChunks):
    """Rewrites a whole graph, and what recognition found in it."""

    def run(self) -> _Rewrite:
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                if node in self.steps:
                    for number in range(self.steps[node].cut.count):
                        self.emit(node, number)
                else:
                    for source in node.all_input_nodes:
                        if source in self.steps:
                            node.replace_input_with(source, self.whole(source))
        for node in reversed(list(self.steps)):
            self.graph.erase_node(node)
        return self

    def site(self, site: UlyssesSite) -> UlyssesSite:
        """Returns the same site, with the chunks of what was cut in place of it."""
        q, k, v, o = map(self._leg, site.legs)
        attention = site.attention
        nodes = self._all(attention.nodes)
        output = self._all((attention.output,))[-1]
        attention = replace(attention, nodes=nodes, output=output)
        independent = self._all(site.independent)
        return replace(site, attention=attention, q=q, k=k, v=v, o=o, independent=independent)

    def _all(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(
            chunk for node in nodes for chunk in self.chunks.get(node, (node,)) if chunk is not None
        )

    def _leg(self, leg: Leg) -> Leg:
        projections = tuple(part for item in leg.projections for part in self._projection(item))
        return replace(leg, exchange=self._exchange_of(leg.exchange), projections=projections)

    def _projection(self, item: Projection) -> list[Projection]:
        if item.node not in self.chunks:
            return [item]
        chunks = self._all((item.node,))
        return [replace(item, node=chunk, rows=sizes_of(chunk)[0]) for chunk in chunks]

    def _exchange_of(self, exchange: Exchange) -> Exchange:
        if not any(piece.start in self.chunks for piece in exchange.pieces):
            return exchange
        pieces = [part for piece in exchange.pieces for part in self._pieces_of(piece)]
        return replace(
            exchange,
            start=pieces[0].start,
            wait=pieces[-1].wait,
            source=pieces[0].source,
            result=pieces[0].result,
            chunks=tuple(pieces) if len(pieces) > 1 else (),
        )

    def _pieces_of(self, piece: Exchange) -> list[Exchange]:
        if piece.start not in self.chunks:
            return [piece]
        lengths = numbers(self.steps[piece.start].cut.lengths, piece.start)
        return [
            replace(
                piece,
                start=self.chunk(piece.start, number),
                wait=self.chunk(piece.wait, number),
                source=bound(self.chunk(piece.start, number))["input"],
                result=self.chunk(piece.wait, number),
                splits=tuple(bound(self.chunk(piece.start, number))["input_split_sizes"]),
                size_bytes=piece.size_bytes * length // sum(lengths),
            )
            for number, length in enumerate(lengths)
            if length
        ]
