"""chunk-heads: run an attention and its exchanges per group of local heads.

Needs     recognised sites; how many chunks they are to be cut into, or what ops and exchanges cost,
          the same on every rank.
Rewrites  the exchanges of a site, what stands between them and its attention, and the attention:
          once per chunk. A way in sends the chunk's heads of every rank, taken out of what was
          packed; a way out is unpacked per chunk and joined behind that. Chunks stand one after
          the other, ways in where they were.
Keeps     every value, bit for bit: heads do not see each other in an attention. As many bytes
          travel as before, in more messages.
Declines  a site whose heads cannot be followed from exchange to exchange, or do not divide.

    [P*S*B*h*D] -> exchange -> ... -> attention [B, h, N, D] -> ... -> exchange -> ...
    n times: [P*S*B, n, h/n*D] -> select -> exchange -> attention [B, h/n, N, D] -> exchange -> join
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.graph.aten import (
    ALL_TO_ALL,
    BATCHED_MATMUL,
    FUSED_ATTENTION,
    aten,
    bound,
    emit,
    emit_contiguous,
    emit_shape,
    is_concatenation,
    is_number,
    is_pointwise,
    is_tensor,
    shape_of,
)
from cocodiff_compile.graph.exchanges import view_path
from cocodiff_compile.graph.head_cut import CutUnknown, HeadCut, step_cut
from cocodiff_compile.graph.layout import divides, known, same
from cocodiff_compile.graph.pipeline import PassResult
from cocodiff_compile.graph.records import (
    Attention,
    Declined,
    Exchange,
    Recognition,
    UlyssesSite,
)
from cocodiff_compile.passes.chunk_tokens import token_tasks
from cocodiff_compile.schedule.chunked_tasks import choose_chunks
from cocodiff_compile.schedule.costs import Costs

_MAX_REGION = 512
AUTO_COUNTS = (2, 3, 4)
"""What "auto" tries."""


@dataclass(frozen=True)
class ChunkHeads:
    """Every site in `chunks` chunks; given costs instead, in as many as are estimated to pay, where
    tokens will run in one of `token_chunks` chunks, whichever is best.
    """

    chunks: int | Costs
    token_chunks: tuple[int, ...] = (1,)
    name: str = "chunk-heads"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        if isinstance(self.chunks, Costs):
            return chunk_heads(graph, found, self._cheapest(graph, found, self.chunks))
        counts = dict.fromkeys(range(len(found.sites)), self.chunks)
        return chunk_heads(graph, found, counts)

    def _cheapest(self, graph: Graph, found: Recognition, costs: Costs) -> dict[int, int]:
        """How many chunks are estimated to take least, by site."""
        allowed = {
            place: [n for n in AUTO_COUNTS if isinstance(plan_chunks(site, n), ChunkPlan)]
            for place, site in enumerate(found.sites)
        }
        choices = [
            choose_chunks(tasks, allowed, costs.planned, costs.device.launch_s)
            for tasks in (token_tasks(graph, found, costs, n) for n in self.token_chunks)
        ]
        return min(choices, key=lambda choice: choice.seconds).counts


def chunk_heads(graph: Graph, found: Recognition, counts: Mapping[int, int]) -> PassResult:
    """Cuts each site, by its place in the recognition, into as many chunks as `counts` says."""
    plans = {
        place: plan_chunks(found.sites[place], count)
        for place, count in counts.items()
        if count > 1
    }
    sites = list(found.sites)
    for place, plan in plans.items():
        if isinstance(plan, ChunkPlan):
            sites[place] = _Rewrite(graph, plan).run()
    declined = tuple(plan for plan in plans.values() if isinstance(plan, Declined))
    made = [plan.count for plan in plans.values() if isinstance(plan, ChunkPlan)]
    notes = tuple(f"{made.count(n)} attentions in {n} chunks" for n in sorted(set(made)))
    return PassResult(bool(made), replace(found, sites=tuple(sites)), declined, notes)


@dataclass(frozen=True)
class ChunkPlan:
    """How a site is cut: where heads lie in every tensor between its exchanges."""

    site: UlyssesSite
    count: int
    cuts: Mapping[Node, HeadCut]
    """Of what is exchanged on the ways in, and of every node from there to the joined result."""
    region: tuple[Node, ...]
    """What is computed per chunk, in graph order: from the waits of the ways in to what the way out
    sends.
    """
    outside: Mapping[tuple[Node, Node], HeadCut]
    """By a node of the region and what it reads from elsewhere: that one's cut, if it holds heads.
    """
    unpacking: tuple[Node, ...]
    """From the wait of the way out to its result."""


def plan_chunks(site: UlyssesSite, count: int) -> ChunkPlan | Declined:
    """The plan to cut a site, or why it cannot be cut."""
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
    cuts: dict[Node, HeadCut] = {}
    starts = [item.start for item in _ways_in(site)]
    for exchange in _ways_in(site):
        packed = bound(exchange.start)["input"]
        cuts[packed] = _cut_of_packed(exchange, packed, count)
        _refuse_unknown_sizes(packed, cuts[packed])
        cuts[exchange.start] = step_cut(cuts[packed], packed, exchange.start, count)
    out = site.o.exchange
    region = _region(starts, out.start)
    outside: dict[tuple[Node, Node], HeadCut] = {}
    for node in (*region, out.start):
        cuts[node] = _common_cut(node, cuts, count)
        outside.update(_outside(node, cuts))
    unpacking = _chain(out.start, out.result)
    for before, node in zip((out.start, *unpacking), unpacking, strict=False):
        cuts[node] = step_cut(cuts[before], before, node, count)
    _refuse_unknown_sizes(out.result, cuts[out.result])
    return ChunkPlan(site, count, cuts, region, outside, unpacking)


def _ways_in(site: UlyssesSite) -> list[Exchange]:
    return [item for item in site.exchanges if item.way == "in"]


def _cut_of_packed(exchange: Exchange, packed: Node, count: int) -> HeadCut:
    path = view_path(exchange.source, packed)
    cut = HeadCut(exchange.scatter_dim, exchange.num_ranks)
    for before, node in itertools.pairwise(path):
        cut = step_cut(cut, before, node, count)
    return cut


def _refuse_unknown_sizes(node: Node, cut: HeadCut) -> None:
    """Of [outer, heads] one size may be symbolic, not both."""
    size = shape_of(node)[cut.dim]
    if known(cut.outer) is None and known(size // cut.outer) is None:
        raise CutUnknown(f"{node.name} has two symbolic sizes around its heads")


def _region(starts: Sequence[Node], end: Node) -> tuple[Node, ...]:
    """All that the data of `starts` pass through before `end`, which is all they may reach."""
    found: set[Node] = set()
    stack = list(starts)
    while stack:
        for user in stack.pop().users:
            if user is end or user in found:
                continue
            if user.op != "call_function" or is_number(user):
                raise CutUnknown(f"{user.name} reads what was exchanged")
            found.add(user)
            stack.append(user)
        if len(found) > _MAX_REGION:
            raise CutUnknown("what was exchanged is read far beyond the attention")
    return tuple(sorted(found))


def _common_cut(node: Node, cuts: Mapping[Node, HeadCut], count: int) -> HeadCut:
    """The cut of a node as each of its inputs sees it; they must agree."""
    inputs = [source for source in node.all_input_nodes if source in cuts]
    found = [step_cut(cuts[source], source, node, count) for source in inputs]
    if any(cut.dim != found[0].dim or not same(cut.outer, found[0].outer) for cut in found):
        raise CutUnknown(f"{node.name} joins tensors whose heads lie in different places")
    return found[0]


def _outside(node: Node, cuts: Mapping[Node, HeadCut]) -> dict[tuple[Node, Node], HeadCut]:
    """What a node reads beside data of the attention, where it has a part for each head."""
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
        _refuse_unknown_sizes(source, found[node, source])
    return found


def _chain(start: Node, end: Node) -> tuple[Node, ...]:
    """The only readers, one after the other, from behind `start` to `end`."""
    chain = [end]
    while chain[-1].all_input_nodes[0] is not start:
        chain.append(chain[-1].all_input_nodes[0])
    chain.reverse()
    for node in (start, *chain[:-1]):
        if len(node.users) != 1:
            raise CutUnknown(f"{node.name}, before its heads are joined, has several readers")
    return tuple(chain)


@dataclass
class _Rewrite:
    graph: Graph
    plan: ChunkPlan
    copies: list[dict[Node, Node]] = field(default_factory=list)
    """By chunk: what stands for each node of the plan."""

    def run(self) -> UlyssesSite:
        site, out = self.plan.site, self.plan.site.o.exchange
        self.copies = [{} for _ in range(self.plan.count)]
        for exchange in _ways_in(site):
            with self.graph.inserting_before(exchange.start):
                self._send(exchange.start)
        with self.graph.inserting_before(out.start):
            for chunk in range(self.plan.count):
                self._copy_all(self.plan.region, chunk)
                source = self.copies[chunk][bound(out.start)["input"]]
                self.copies[chunk][out.start] = self._exchange(out.start, source)
        with self.graph.inserting_before(self.plan.unpacking[0]):
            for chunk in range(self.plan.count):
                self._copy_all(self.plan.unpacking, chunk)
            joined = self._join(out.result)
        out.result.replace_all_uses_with(joined)
        chunked = self._chunked_site(joined)
        self._erase()
        return chunked

    def _send(self, start: Node) -> None:
        packed = bound(start)["input"]
        for chunk, copies in enumerate(self.copies):
            part = self._part(packed, self.plan.cuts[packed], chunk)
            copies[start] = self._exchange(start, emit_contiguous(self.graph, part))

    def _exchange(self, start: Node, source: Node) -> Node:
        """The exchange that `start` is, of a chunk of what it sends."""
        arguments = bound(start)
        splits = arguments["input_split_sizes"]
        if self.plan.cuts[start].dim == 0:
            splits = [self._divided(split, source) for split in splits]
        group = arguments["group_name"]
        return emit(self.graph, ALL_TO_ALL, source, splits, splits, group, like=source)

    def _copy_all(self, nodes: Iterable[Node], chunk: int) -> None:
        copies = self.copies[chunk]
        for node in nodes:
            inputs = {
                source: copies[source] if source in copies else self._whole(node, source, chunk)
                for source in node.all_input_nodes
            }
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
            if node.target in _SIZED:
                args = self._with_fewer_heads(node, args)
            like = node if is_tensor(node) else next(filter(is_tensor, inputs))
            assert callable(node.target)
            copies[node] = emit(self.graph, node.target, *args, like=like, **kwargs)

    def _whole(self, node: Node, source: Node, chunk: int) -> Node:
        """What a node reads from elsewhere: all of it, or the part of this chunk's heads."""
        cut = self.plan.outside.get((node, source))
        return source if cut is None else self._part(source, cut, chunk)

    def _with_fewer_heads(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a reshape, with the size that a chunk has in the dim of the heads."""
        dim, sizes = self.plan.cuts[node].dim, list(args[1])
        sizes[dim] = self._divided(sizes[dim], args[0])
        return (args[0], sizes, *args[2:])

    def _divided(self, size: int | Node, like: Node) -> int | Node:
        if isinstance(size, Node):
            return emit(self.graph, operator.floordiv, size, self.plan.count, like=like)
        return size if size == -1 else size // self.plan.count

    def _part(self, whole: Node, cut: HeadCut, chunk: int) -> Node:
        """The elements of one chunk."""
        graph, count = self.graph, self.plan.count
        shape = emit_shape(graph, whole)
        before, after = shape[: cut.dim], shape[cut.dim + 1 :]
        outer, heads = _two_sizes(shape_of(whole)[cut.dim], cut, count)
        viewed = emit(
            graph, aten.view.default, whole, [*before, outer, count, heads, *after], like=whole
        )
        picked = emit(graph, aten.select.int, viewed, cut.dim + 1, chunk, like=whole)
        if same(cut.outer, 1):
            return emit(graph, aten.squeeze.dim, picked, cut.dim, like=whole)
        picked = emit_contiguous(graph, picked)
        return emit(graph, aten.view.default, picked, [*before, -1, *after], like=whole)

    def _join(self, whole: Node) -> Node:
        """What stands for `whole`, from all chunks."""
        graph, cut = self.graph, self.plan.cuts[whole]
        parts = [copies[whole] for copies in self.copies]
        if same(cut.outer, 1):
            return emit(graph, aten.cat.default, parts, cut.dim, like=parts[0])
        outer, heads = _two_sizes(shape_of(whole)[cut.dim], cut, self.plan.count)
        blocks = []
        for part in parts:
            shape = emit_shape(graph, part)
            split = [*shape[: cut.dim], outer, heads, *shape[cut.dim + 1 :]]
            part = emit_contiguous(graph, part)  # noqa: PLW2901
            blocks.append(emit(graph, aten.view.default, part, split, like=part))
        joined = emit(graph, aten.cat.default, blocks, cut.dim + 1, like=parts[0])
        shape = emit_shape(graph, joined)
        merged = [*shape[: cut.dim], -1, *shape[cut.dim + 2 :]]
        return emit(graph, aten.view.default, joined, merged, like=joined)

    def _chunked_site(self, joined: Node) -> UlyssesSite:
        site = self.plan.site
        chunked = {item.start: self._chunked(item, joined) for item in site.exchanges}
        q, k, v, o = (replace(leg, exchange=chunked[leg.exchange.start]) for leg in site.legs)
        attention = site.attention
        nodes = tuple(copies[node] for copies in self.copies for node in attention.nodes)
        output = self.copies[-1][attention.output]
        attention = Attention(attention.form, nodes, output, attention.mask, attention.is_causal)
        return replace(site, attention=attention, q=q, k=k, v=v, o=o)

    def _chunked(self, exchange: Exchange, joined: Node) -> Exchange:
        chunks = tuple(self._chunk_of(exchange, copies) for copies in self.copies)
        first, last = chunks[0], chunks[-1]
        result = first.result if exchange.way == "in" else joined
        return replace(
            exchange,
            start=first.start,
            wait=last.wait,
            source=first.source,
            scatter_dim=first.scatter_dim,
            result=result,
            chunks=chunks,
        )

    def _chunk_of(self, exchange: Exchange, copies: Mapping[Node, Node]) -> Exchange:
        start = copies[exchange.start]
        splits = bound(start)["input_split_sizes"]
        source, scatter_dim = bound(start)["input"], 0
        if exchange.way == "out":
            source, scatter_dim = copies[exchange.source], exchange.scatter_dim
        return replace(
            exchange,
            start=start,
            wait=copies[exchange.wait],
            source=source,
            scatter_dim=scatter_dim,
            result=copies[exchange.result],
            splits=tuple(s.meta["val"] if isinstance(s, Node) else s for s in splits),
            size_bytes=exchange.size_bytes // self.plan.count,
        )

    def _erase(self) -> None:
        """What the chunks replace; waits count as side effects, which nothing else removes."""
        site = self.plan.site
        starts = [item.start for item in _ways_in(site)]
        old = (*starts, *self.plan.region, site.o.exchange.start, *self.plan.unpacking)
        for node in reversed(old):
            self.graph.erase_node(node)


_SIZED = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
    }
)
"""Whose second argument is a shape."""


def _two_sizes(size: Any, cut: HeadCut, count: int) -> tuple[int, int]:
    """(blocks, size of a chunk in a block) as arguments of a view; -1 for the symbolic one."""
    outer, heads = known(cut.outer), known(size // cut.outer)
    return -1 if outer is None else outer, -1 if heads is None else heads // count
