# SPDX-License-Identifier: Apache-2.0
"""chunk-heads: run an attention and its exchanges per group of local heads.

Needs     recognised sites; how many chunks each is to be cut into.
Rewrites  the exchanges of a site, what stands between them and its attention, and the attention:
          once per chunk. An input exchange sends the chunk's heads of every rank, taken out of what
          was packed; an output exchange is unpacked per chunk and joined behind that. Chunks stand
          one after the other, input exchanges where they were.
Keeps     every value, bit for bit: heads do not see each other in an attention. As many bytes
          are sent as before, in more messages.
Declines  a site whose heads cannot be followed from exchange to exchange, through ops that the
          table of `cut/rules.py` lists, or do not divide; one whose result is multiplied as a
          slice of a larger tensor, which chunks would join closer together.

    [P*S*B*h*D] -> exchange -> ... -> attention [B, h, N, D] -> ... -> exchange -> ...
    n times: [P*S*B, n, h/n*D] -> select -> exchange -> attention [B, h/n, N, D] -> exchange -> join
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from cocodiff_compile.cut.checked_steps import refuse_symbolic_blocks, step_heads
from cocodiff_compile.cut.cut import Cut, CutUnknown, Step
from cocodiff_compile.cut.emit_chunks import EmitChunks
from cocodiff_compile.cut.joining import is_dense
from cocodiff_compile.ir.aten import bound, is_heavy, is_number, readers_of, shape_of
from cocodiff_compile.ir.collectives import is_collective
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.layout import divides
from cocodiff_compile.ir.records import Declined, Exchange, Recognition, UlyssesSite
from cocodiff_compile.recognize.exchanges import view_path

_MAX_REGION = 512


@dataclass(frozen=True)
class ChunkHeads:
    """`chunks` is the number of chunks of every attention, or one number for each."""

    chunks: int | tuple[int, ...]
    name: str = "chunk-heads"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:
        chunks = self.chunks
        counts = (chunks,) * len(recognition.sites) if isinstance(chunks, int) else chunks
        return chunk_heads(graph, recognition, dict(enumerate(counts)))


def chunk_heads(graph: Graph, recognition: Recognition, counts: Mapping[int, int]) -> PassResult:
    """Cuts each site, by its place in the recognition, into as many chunks as `counts` says."""
    plans = {
        place: plan_chunks(recognition.sites[place], count)
        for place, count in counts.items()
        if count > 1
    }
    sites = list(recognition.sites)
    for place, plan in plans.items():
        if isinstance(plan, ChunkPlan):
            sites[place] = _Rewrite.of(graph, plan).run()
    declined = tuple(plan for plan in plans.values() if isinstance(plan, Declined))
    made = [plan.count for plan in plans.values() if isinstance(plan, ChunkPlan)]
    notes = tuple(f"{made.count(n)} attentions in {n} chunks" for n in sorted(set(made)))
    return PassResult(bool(made), replace(recognition, sites=tuple(sites)), declined, notes)


@dataclass(frozen=True)
class ChunkPlan:
    """Says how a site is cut: where heads lie in every tensor between its exchanges."""

    site: UlyssesSite
    count: int
    steps: Mapping[Node, Step]
    """The steps of the input exchanges, and of every node from there to the joined result."""
    region: tuple[Node, ...]
    """The nodes computed per chunk, in graph order: from the waits of the input exchanges to what
    the output exchange sends.
    """
    unpacking: tuple[Node, ...]
    """The nodes from the wait of the output exchange to its result."""


def plan_chunks(site: UlyssesSite, count: int) -> ChunkPlan | Declined:
    """Returns the plan to cut a site, or why it cannot be cut."""
    try:
        return _plan(site, count)
    except CutUnknown as unknown:
        reason = f"its heads cannot be cut into {count} chunks: {unknown}"
        return Declined(site.attention.output, reason, site.module_path)


def _plan(site: UlyssesSite, count: int) -> ChunkPlan:
    for leg in site.legs[:3]:
        heads = leg.num_heads // leg.exchange.num_ranks
        if not divides(count, heads):
            raise CutUnknown(f"a rank has {heads} heads of {leg.role.upper()}")
    steps: dict[Node, Step] = {}
    for exchange in _input_exchanges(site):
        packed = bound(exchange.start)["input"]
        cut = _cut_of_packed(exchange, packed, count)
        refuse_symbolic_blocks(packed, cut)
        steps[exchange.start] = step_heads(exchange.start, {packed: cut})
    out = site.o.exchange
    region = _region(list(steps), out.start)
    unpacking = _chain(out.start, out.result)
    for node in (*region, out.start, *unpacking):
        reads = {source: steps[source].cut for source in node.all_input_nodes if source in steps}
        steps[node] = step_heads(node, reads)
    refuse_symbolic_blocks(out.result, steps[out.result].cut)
    if not is_dense(out.result) and any(map(is_heavy, readers_of(out.result))):
        raise CutUnknown(f"{out.result.name} is multiplied as a slice of a larger tensor")
    return ChunkPlan(site, count, steps, region, unpacking)


def _input_exchanges(site: UlyssesSite) -> list[Exchange]:
    return [item for item in site.exchanges if item.direction == "in"]


def _cut_of_packed(exchange: Exchange, packed: Node, count: int) -> Cut:
    dim = exchange.scatter_dim
    size = shape_of(exchange.source)[dim]
    cut = Cut.in_equal_chunks(dim, exchange.num_ranks, size, count)
    for before, node in itertools.pairwise(view_path(exchange.source, packed)):
        cut = step_heads(node, {before: cut}).cut
    return cut


def _region(starts: Sequence[Node], end: Node) -> tuple[Node, ...]:
    """Returns all between `starts` and `end`. Raises CutUnknown if data reach anything else."""
    found: set[Node] = set()
    stack = list(starts)
    while stack:
        for user in stack.pop().users:
            if user is end or user in found:
                continue
            if user.op != "call_function" or is_number(user):
                raise CutUnknown(f"{user.name} reads what was exchanged")
            if is_collective(user):
                raise CutUnknown(f"{user.name} sends what was exchanged elsewhere")
            found.add(user)
            stack.append(user)
        if len(found) > _MAX_REGION:
            raise CutUnknown("what was exchanged is read far beyond the attention")
    return tuple(sorted(found))


def _chain(start: Node, end: Node) -> tuple[Node, ...]:
    """Returns the chain of only readers from `start` to `end`. Raises CutUnknown for others."""
    chain = [end]
    while chain[-1].all_input_nodes[0] is not start:
        chain.append(chain[-1].all_input_nodes[0])
    chain.reverse()
    for node in (start, *chain[:-1]):
        if len(node.users) != 1:
            raise CutUnknown(f"{node.name}, before its heads are joined, has several readers")
    return tuple(chain)


@dataclass(frozen=True)
class _Rewrite:
    graph: Graph
    plan: ChunkPlan
    chunks: EmitChunks

    @classmethod
    def of(cls, graph: Graph, plan: ChunkPlan) -> _Rewrite:
        return cls(graph, plan, EmitChunks(graph, plan.steps, keeps_ops=True))

    def run(self) -> UlyssesSite:
        site, out = self.plan.site, self.plan.site.o.exchange
        for exchange in _input_exchanges(site):
            self._emit([exchange.start], exchange.start)
        self._emit((*self.plan.region, out.start), out.start)
        self._emit(self.plan.unpacking, self.plan.unpacking[0])
        with self.graph.inserting_before(self.plan.unpacking[0]):
            joined = self.chunks.whole(out.result)
        out.result.replace_all_uses_with(joined)
        chunked = self._chunked_site(joined)
        self._erase()
        return chunked

    def _emit(self, nodes: Sequence[Node], before: Node) -> None:
        """Emits all nodes of one chunk, then all of the next."""
        with self.graph.inserting_before(before):
            for number in range(self.plan.count):
                for node in nodes:
                    self.chunks.emit(node, number)

    def _chunked_site(self, joined: Node) -> UlyssesSite:
        site = self.plan.site
        chunked = {item.start: self._chunked(item, joined) for item in site.exchanges}
        q, k, v, o = (replace(leg, exchange=chunked[leg.exchange.start]) for leg in site.legs)
        attention = site.attention
        nodes = tuple(
            self.chunks.chunk(node, number)
            for number in range(self.plan.count)
            for node in attention.nodes
        )
        output = self.chunks.chunk(attention.output, self.plan.count - 1)
        attention = replace(attention, nodes=nodes, output=output)
        return replace(site, attention=attention, q=q, k=k, v=v, o=o)

    def _chunked(self, exchange: Exchange, joined: Node) -> Exchange:
        chunks = tuple(self._chunk_of(exchange, number) for number in range(self.plan.count))
        first, last = chunks[0], chunks[-1]
        result = first.result if exchange.direction == "in" else joined
        return replace(
            exchange,
            start=first.start,
            wait=last.wait,
            source=first.source,
            scatter_dim=first.scatter_dim,
            result=result,
            chunks=chunks,
        )

    def _chunk_of(self, exchange: Exchange, number: int) -> Exchange:
        start = self.chunks.chunk(exchange.start, number)
        splits = bound(start)["input_split_sizes"]
        source, scatter_dim = bound(start)["input"], 0
        if exchange.direction == "out":
            source, scatter_dim = self.chunks.chunk(exchange.source, number), exchange.scatter_dim
        return replace(
            exchange,
            start=start,
            wait=self.chunks.chunk(exchange.wait, number),
            source=source,
            scatter_dim=scatter_dim,
            result=self.chunks.chunk(exchange.result, number),
            splits=tuple(s.meta["val"] if isinstance(s, Node) else s for s in splits),
            size_bytes=exchange.size_bytes // self.plan.count,
        )

    def _erase(self) -> None:
        """Erases what the chunks replace; waits are side effects, which nothing else removes."""
        site = self.plan.site
        starts = [item.start for item in _input_exchanges(site)]
        old = (*starts, *self.plan.region, site.o.exchange.start, *self.plan.unpacking)
        for node in reversed(old):
            self.graph.erase_node(node)
