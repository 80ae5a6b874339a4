"""chunk-tokens: run what lies between attentions per run of this rank's tokens.

Needs     recognised sites, in chunks of heads or not; in how many runs the tokens are to be cut.
Rewrites  the queries of every attention, and all that is computed row by row from there on: ways
          out, projections, norms, MLPs, the next attention's ways in. Keys and values are joined
          again in front of their attention.
Keeps     every value: rows do not see each other in any of this. Bit for bit where the library
          that multiplies computes a row alike whatever stands beside it, as on CPU. As many bytes
          travel as before, in more messages.
Declines  a site whose tokens cannot be followed from its queries through its way out, through ops
          that the tables of `cut/row_cut.py` list.

    exchange -> [S, C] -> projection, norm, MLP [S, C] -> exchange
    n times:    [s, C] -> projection, norm, MLP [s, C] -> exchange: one run computes while others
    travel
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from cocodiff_compile.cut.head_cut import CutUnknown
from cocodiff_compile.cut.row_cut import (
    RowCut,
    RowPlan,
    RowStep,
    sizes_of,
    step_rows,
)
from cocodiff_compile.cut.row_runs import RowRuns
from cocodiff_compile.ir.aten import aten, bound, parse_fused_attention
from cocodiff_compile.ir.attention_ops import FUSED_ATTENTION
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import (
    Attention,
    Declined,
    Exchange,
    Leg,
    Projection,
    Recognition,
    UlyssesSite,
)


def plan_rows(graph: Graph, sites: Sequence[UlyssesSite], count: int) -> RowPlan:
    """Follows runs of rows from the queries of `sites` through the graph."""
    seeds = {
        node: site
        for site in sites
        for node in site.attention.nodes
        if node.target in FUSED_ATTENTION
    }
    exchanges = frozenset(piece.start for site in sites for piece in site.pieces)
    cuts: dict[Node, RowCut] = {}
    steps: dict[Node, RowStep] = {}
    stopped: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reads = {source: cuts[source] for source in node.all_input_nodes if source in cuts}
        try:
            if node in seeds and (query := parse_fused_attention(node).query) not in cuts:
                reads[query] = _first_cut(query, seeds[node], count)
            if not reads:
                continue
            if any(user.target is aten.as_strided.default for user in node.users):
                raise CutUnknown(f"{node.name} is read by its place in memory")
            steps[node] = step_rows(node, reads, exchanges)
            cuts[node] = steps[node].cut
        except CutUnknown as unknown:
            stopped[node] = str(unknown)
    return RowPlan(steps, count, stopped)


def _first_cut(query: Node, site: UlyssesSite, count: int) -> RowCut:
    num_ranks = site.o.exchange.num_ranks
    tokens, rest = divmod(sizes_of(query)[2], num_ranks)
    if rest or tokens < count:
        raise CutUnknown(f"{sizes_of(query)[2]} tokens of {num_ranks} ranks")
    most = -(-tokens // count)
    return RowCut(2, num_ranks, (*[most] * (count - 1), tokens - most * (count - 1)))


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of a rank in `chunks` chunks, from the attentions at these places of the
    recognition on; None: from all that can be cut.
    """

    chunks: int
    attentions: tuple[int, ...] | None = None
    name: str = "chunk-tokens"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        if self.attentions is None:
            plan, declined = plan_runs(graph, found.sites, self.chunks)
        else:
            sites = [found.sites[place] for place in self.attentions]
            plan, declined = plan_rows(graph, sites, self.chunks), ()
        return replace(chunk_tokens(graph, found, plan), declined=declined)


def chunk_tokens(graph: Graph, found: Recognition, plan: RowPlan) -> PassResult:
    """Computes run by run what is in the plan."""
    if not plan.steps:
        return PassResult(False)
    made = _Rewrite(graph, plan).run()
    graph.eliminate_dead_code()
    recognition = replace(found, sites=tuple(map(made.site, found.sites)))
    cut = sum(
        site.attention != old.attention
        for site, old in zip(recognition.sites, found.sites, strict=True)
    )
    return PassResult(
        True, recognition, notes=(f"tokens of {cut} attentions in {plan.count} runs",)
    )


def plan_runs(
    graph: Graph, sites: Sequence[UlyssesSite], count: int
) -> tuple[RowPlan, tuple[Declined, ...]]:
    """The plan for all sites whose runs reach their way out, and the other sites."""
    plan = plan_rows(graph, sites, count)
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
        plan = plan_rows(graph, able, count)
    return plan, tuple(declined.values())


def _behind(site: UlyssesSite) -> Iterable[Node]:
    """From the attention to the way out, in graph order."""
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


class _Rewrite(RowRuns):
    """A whole graph, and what recognition found in it."""

    def run(self) -> _Rewrite:
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                if node in self.plan.steps:
                    self.runs[node] = self._runs_of(node)
                else:
                    for source in node.all_input_nodes:
                        if source in self.plan.steps:
                            node.replace_input_with(source, self._whole(source))
        for node in reversed(list(self.plan.steps)):
            self.graph.erase_node(node)
        return self

    def site(self, site: UlyssesSite) -> UlyssesSite:
        """The same site, with the runs of what was cut in place of it."""
        q, k, v, o = map(self._leg, site.legs)
        attention = site.attention
        nodes = self._all(attention.nodes)
        output = self._all((attention.output,))[-1]
        attention = Attention(attention.form, nodes, output, attention.mask, attention.is_causal)
        independent = self._all(site.independent)
        return replace(site, attention=attention, q=q, k=k, v=v, o=o, independent=independent)

    def _all(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(
            run for node in nodes for run in self.runs.get(node, (node,)) if run is not None
        )

    def _leg(self, leg: Leg) -> Leg:
        projections = tuple(part for item in leg.projections for part in self._projection(item))
        return replace(leg, exchange=self._exchange_of(leg.exchange), projections=projections)

    def _projection(self, item: Projection) -> list[Projection]:
        if item.node not in self.runs:
            return [item]
        runs = [run for run in self.runs[item.node] if run is not None]
        return [replace(item, node=run, rows=sizes_of(run)[0]) for run in runs]

    def _exchange_of(self, exchange: Exchange) -> Exchange:
        if not any(piece.start in self.runs for piece in exchange.pieces):
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
        if piece.start not in self.runs:
            return [piece]
        rows = self.plan.steps[piece.start].cut
        return [
            replace(
                piece,
                start=self._existing(piece.start, number),
                wait=self._existing(piece.wait, number),
                source=bound(self._existing(piece.start, number))["input"],
                result=self._existing(piece.wait, number),
                splits=tuple(bound(self._existing(piece.start, number))["input_split_sizes"]),
                size_bytes=piece.size_bytes * length // rows.rows,
            )
            for number, length in enumerate(rows.lengths)
            if length
        ]
