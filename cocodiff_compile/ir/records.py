# SPDX-License-Identifier: Apache-2.0
"""Records what recognition finds. Shapes: B batch, S tokens per rank, N = P*S tokens,
H heads, h = H/P heads per rank, D head size, P ranks of the Ulysses group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias

from torch.fx import Graph, Node

from cocodiff_compile.ir.layout import Size

Role: TypeAlias = Literal["q", "k", "v", "o"]


@dataclass(frozen=True)
class ExchangePhase:
    """One all-to-all of an exchange that runs in several, along some axes of the machine."""

    axes: tuple[str, ...]
    start: Node
    wait: Node
    group: str


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of a Ulysses attention.

    An input exchange (of q, k, v) scatters heads and gathers tokens, the output exchange (of o)
    scatters tokens and gathers heads. `scatter_dim` is a dim of `source`, the tensor before the
    model's own packing; `gather_dim` a dim of `result`, the tensor after its unpacking. Where
    padded rows are dropped or put back between exchange and attention, both hold all that is sent.
    In phases, `start` is the first phase's and `wait` the last one's, while `group` and `splits`
    stay those of the exchange as captured. In chunks, `start` is the first chunk's and `wait` the
    last one's; `source` and `result` are the first chunk's; an output exchange in chunks of heads
    has the result of all chunks.
    """

    start: Node
    wait: Node
    source: Node
    result: Node
    direction: Literal["in", "out"]
    group: str
    ranks: tuple[int, ...]
    splits: tuple[Size, ...]
    scatter_dim: int
    gather_dim: int
    size_bytes: Size
    token_rows: tuple[int, int] | None = None
    """(elements before the tokens, tokens) in what one rank sends to one other, [before, tokens,
    behind]; None where tokens do not lie together, or sizes are symbolic.
    """
    phases: tuple[ExchangePhase, ...] = ()
    chunks: tuple[Exchange, ...] = ()
    """The same exchange for some heads and some tokens each; none if it runs for all at once."""

    @property
    def pieces(self) -> tuple[Exchange, ...]:
        """Returns what is exchanged at once: the chunks, or the whole."""
        return self.chunks or (self,)

    def with_pieces(self, rewritten: Mapping[Node, Exchange]) -> Exchange:
        """Returns this with other pieces in place of those that begin at the given starts."""
        if not self.chunks:
            return rewritten.get(self.start, self)
        chunks = tuple(chunk.with_pieces(rewritten) for chunk in self.chunks)
        result = chunks[0].result if self.direction == "in" else self.result
        return replace(
            self,
            start=chunks[0].start,
            wait=chunks[-1].wait,
            result=result,
            size_bytes=sum(chunk.size_bytes for chunk in chunks),
            chunks=chunks,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def wire_bytes(self) -> Size:
        """Bytes this rank sends to others; the block it keeps is not sent."""
        return self.size_bytes // self.num_ranks * (self.num_ranks - 1)


@dataclass(frozen=True)
class Projection:
    """A GEMM whose output feeds a leg; `columns` is the leg's part of one that serves several."""

    node: Node
    rows: Size
    out_features: Size
    columns: tuple[Size, Size] | None

    @property
    def is_fused(self) -> bool:
        return self.columns is not None


@dataclass(frozen=True)
class Leg:
    """One role of an attention: the way from its projections through its exchange to the attention
    (q, k, v), or from the attention through its exchange to the output projections (o).

    Heads and tokens are those that are sent: padding that makes them divide is counted, also where
    it is dropped before the attention reads them.
    """

    role: Role
    exchange: Exchange
    projections: tuple[Projection, ...]
    num_heads: Size
    head_size: Size
    tokens_per_rank: Size


@dataclass(frozen=True)
class Attention:
    """The computation between the input exchanges and the output exchange. In chunks of heads it
    holds all chunks, one after the other, and the output of the last.
    """

    form: Literal["fused", "decomposed"]
    nodes: tuple[Node, ...]
    output: Node
    mask: Node | None
    is_causal: bool


@dataclass(frozen=True)
class UlyssesSite:
    """One Ulysses attention, understood as a whole.

    `independent` are the matmuls and attentions of the same stretch of graph that neither feed this
    attention nor need its result: what an exchange can hide behind.
    """

    index: int
    module_path: str
    attention: Attention
    q: Leg
    k: Leg
    v: Leg
    o: Leg
    independent: tuple[Node, ...]

    @property
    def legs(self) -> tuple[Leg, ...]:
        return (self.q, self.k, self.v, self.o)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Returns each exchange once, also where Q, K and V share one."""
        unique: dict[Node, Exchange] = {leg.exchange.start: leg.exchange for leg in self.legs}
        return tuple(unique.values())

    @property
    def exchanged(self) -> list[tuple[Exchange, tuple[Role, ...], Size]]:
        """Returns each exchange once, with the roles it serves and the elements of a head."""
        found: dict[Node, tuple[Exchange, tuple[Role, ...], Size]] = {}
        for leg in self.legs:
            start = leg.exchange.start
            roles = found[start][1] if start in found else ()
            found[start] = (leg.exchange, (*roles, leg.role), leg.head_size)
        return list(found.values())

    @property
    def pieces(self) -> tuple[Exchange, ...]:
        """Returns each exchange once, chunk by chunk where it runs in chunks."""
        return tuple(piece for exchange in self.exchanges for piece in exchange.pieces)

    def with_exchanges(self, rewritten: Mapping[Node, Exchange]) -> UlyssesSite:
        """Returns this site with other exchanges or pieces for those that begin at the starts."""
        q, k, v, o = (
            replace(leg, exchange=leg.exchange.with_pieces(rewritten)) for leg in self.legs
        )
        return replace(self, q=q, k=k, v=v, o=o)

    @property
    def is_packed(self) -> bool:
        return len(self.exchanges) < len(self.legs)


@dataclass(frozen=True)
class Declined:
    """Names what looks like Ulysses and is left alone; `reason` is a sentence with values."""

    node: Node
    reason: str
    module_path: str = ""


@dataclass(frozen=True)
class Recognition:
    """Holds the Ulysses attentions of a graph, and the all-to-alls of something else."""

    sites: tuple[UlyssesSite, ...] = ()
    declined: tuple[Declined, ...] = ()
    unrelated: tuple[Node, ...] = ()

    def with_exchanges(self, rewritten: Mapping[Node, Exchange]) -> Recognition:
        """Returns this with other exchanges in place of those that begin at the given starts."""
        return replace(self, sites=tuple(site.with_exchanges(rewritten) for site in self.sites))


def with_nodes(record: Any, nodes: Mapping[Node, Node]) -> Any:
    """A record of this file, with other nodes in place of the given ones, all the way down."""
    if isinstance(record, Node):
        return nodes.get(record, record)
    if isinstance(record, tuple):
        return tuple(with_nodes(item, nodes) for item in record)
    if is_dataclass(record) and not isinstance(record, type):
        changed = {
            item.name: with_nodes(getattr(record, item.name), nodes) for item in fields(record)
        }
        return replace(record, **changed)
    return record


def copied(
    graph: Graph, recognition: Recognition, into: Graph | None = None
) -> tuple[Graph, Recognition]:
    """Returns a copy of a graph, written into `into` if given, and its recognition."""
    nodes: dict[Node, Node] = {}
    copy = Graph() if into is None else into
    output = copy.output(copy.graph_copy(graph, nodes))
    # Among it: which outputs callers see, whose strides Inductor must keep.
    output.meta = dict(graph.output_node().meta)
    return copy, with_nodes(recognition, nodes)
