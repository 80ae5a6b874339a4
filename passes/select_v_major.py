# SPDX-License-Identifier: Apache-2.0
"""select-v-major: send what changed since the last denoising step, compressed.

Needs     recognised sites, head and token chunks already cut, no phases yet; the payload of a step,
          and the cached roles that all payloads need.
Rewrites  exchanges. Uncompressed: the exchange stays, and both sides cache what it carried. Coded:
          the exchange carries the difference to what both sides expect, or, intra-coded, the
          values, in few bits. With skipped tokens: Q, K and V of the tokens whose V changed least
          are not sent, and the receiver takes them from its cache; each rank tells the others which
          tokens it skips. Their Q and K are not computed either, nor is their O if it is reused.
          Caches are graph inputs after all other inputs; the graph writes them back in place.
Keeps     every value, bit for bit, where everything is sent uncompressed. Otherwise values change:
          this pass is lossy, and off unless asked for. Values that are not finite are not cached;
          they arrive as they are if sent uncompressed, and as NaN if coded.
Declines  an exchange with symbolic sizes, or with heads whose size is no multiple of 8. Tokens are
          skipped only where each of the three exchanges has a known token dim and is not cut into
          chunks. An attention whose caches exceed the budget, or for which coding would take longer
          than it saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import sort_topologically
from cocodiff_compile.cut.cut import CutUnknown
from cocodiff_compile.cut.selected_rows import SelectionPlan, blocks_before
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import WAIT, aten, bound, emit, shape_of, size_bytes
from cocodiff_compile.ir.collectives import waits_behind
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.inline import Inliner
from cocodiff_compile.ir.layout import Size, static_size
from cocodiff_compile.ir.records import (
    Declined,
    Exchange,
    Leg,
    Recognition,
    Role,
    UlyssesSite,
    with_nodes,
)
from cocodiff_compile.v_major.cached_exchange import CachedExchange, new_input
from cocodiff_compile.v_major.delta_code import FULL, GROUP_MULTIPLE
from cocodiff_compile.v_major.payload import CachedRoles, Payload
from cocodiff_compile.v_major.sent_rows import SentRows, Streams, plan_output, streams_of


@dataclass(frozen=True)
class SelectVMajor:
    """Rewrites the exchanges of all attentions to carry a payload. An exchange that serves several
    roles uses the most bits that any of them asks for. `compare` says whether tokens are compared
    with the value last sent or last seen.
    """

    payload: Payload
    cached_roles: CachedRoles
    compare: Literal["sent", "seen"] = "sent"
    selects_per_stream: bool = False
    """Whether tokens are selected from each stream (text and image, say) separately."""
    skips_unsent: bool = False
    """Whether values that only serve an exchange are computed only for the tokens that are sent."""
    layers: tuple[float, ...] = ()
    """The factor of the skipped share for each attention; empty: 1 for all."""
    measures_drift: bool = False
    uncoded: tuple[str, ...] = ()
    """The reason why each attention is left as it is; an empty string where it is rewritten."""
    name: str = "select-v-major"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:
        rewriting = _Rewriting(Inliner(graph), self)
        self.check_layers(recognition.sites)
        for index, site in enumerate(recognition.sites):
            if reason := self._why_uncoded(index):
                declined = Declined(site.attention.output, reason, site.module_path)
                rewriting.declined.append(declined)
            else:
                cached_roles = self.cached_roles_of(index, site)
                rewriting.place = index
                rewriting.rewrite(site, cached_roles, self._skipped_share(index))
        if self.measures_drift and rewriting.rewritten:
            _emit_drift(graph, rewriting.losses, num_losses(recognition))
        rewriting.erase()
        if self.payload.skipped_share and rewriting.rewritten:
            sort_topologically(graph)
        recognition = recognition.with_exchanges(rewriting.rewritten)
        recognition = with_nodes(recognition, rewriting.replaced)
        note = (
            f"{len(rewriting.rewritten)} exchanges ({self.payload}) cache "
            f"{rewriting.cache_bytes / 2**20:.2f} MiB per guidance pass"
        )
        return PassResult(
            bool(rewriting.rewritten), recognition, tuple(rewriting.declined), (note,)
        )

    def rewrites_any(self, recognition: Recognition) -> bool:
        """Returns whether the pass would change the graph at all."""
        self.check_layers(recognition.sites)
        return any(
            not self._why_uncoded(index)
            and any(_can_cache(item, self.cached_roles_of(index, site)) for item in site.exchanged)
            for index, site in enumerate(recognition.sites)
        )

    def _why_uncoded(self, index: int) -> str:
        return self.uncoded[index] if self.uncoded else ""

    def _skipped_share(self, index: int) -> float:
        """Returns the share of tokens that an attention does not send."""
        return self.payload.skipped_share * (self.layers[index] if self.layers else 1.0)

    def cached_roles_of(self, index: int, site: UlyssesSite) -> CachedRoles:
        """Returns the cached roles of one attention, which are the same for every payload."""
        is_whole = bool(self.layers) and not self.layers[index]
        if is_whole or _why_all_tokens(site):
            return self.cached_roles.without_skipping
        return self.cached_roles

    def check_layers(self, sites: Sequence[UlyssesSite]) -> None:
        if self.layers and len(self.layers) != len(sites):
            raise UserError(
                f"option 'v_major': 'layers' has {len(self.layers)} numbers, and a graph has "
                f"{len(sites)} attentions; give one for each"
            )


class _Rewriting:
    """Rewrites exchanges and collects the results."""

    def __init__(self, inline: Inliner, select: SelectVMajor) -> None:
        self.inline, self.select = inline, select
        self.rewritten: dict[Node, Exchange] = {}
        self.declined: list[Declined] = []
        self.place = 0
        """The place of the attention that is being rewritten."""
        self.losses: list[tuple[int, Node]] = []
        """The losses of coded exchanges, with the place of their attention."""
        self.caches: list[Node] = []
        self.replaced: dict[Node, Node] = {}
        self.unused: list[Node] = []
        """Nodes that nothing reads any more."""

    @property
    def cache_bytes(self) -> int:
        """Returns the bytes of all caches."""
        return sum(static_size(size_bytes(node)) or 0 for node in self.caches)

    def rewrite(self, site: UlyssesSite, cached_roles: CachedRoles, skipped_share: float) -> None:
        """Rewrites the exchanges of one attention, without the `skipped_share` of its tokens."""
        if skipped_share and (reason := _why_all_tokens(site)):
            self._decline_tokens(site, reason)
            skipped_share = 0.0
        planned = self._plan(site, cached_roles, skipped_share)
        by_role = {role: rewrite for rewrite, roles in planned.values() for role in roles}
        tokens = self._plan_tokens(site, by_role, skipped_share) if skipped_share else None
        done = self._skip_tokens(site, by_role, tokens) if tokens else set()
        for start, (rewrite, roles) in planned.items():
            if start not in done:
                self._rewrite_whole(start, rewrite, _most_bits(self.select.payload, roles))

    def erase(self) -> None:
        """Erases rewritten nodes, users first: waits, as side effects, would stay otherwise."""
        for start in self.rewritten:
            self.unused += [start, *waits_behind(start)]
        for node in sorted(self.unused, reverse=True):
            self.inline.graph.erase_node(node)

    def _plan(
        self, site: UlyssesSite, cached_roles: CachedRoles, skipped_share: float
    ) -> dict[Node, tuple[CachedExchange, tuple[Role, ...]]]:
        """Returns the exchanges to rewrite by their start, with their caches added as graph inputs.
        The order is the same for every payload, so that all variants of a graph share the positions
        of their caches.
        """
        planned: dict[Node, tuple[CachedExchange, tuple[Role, ...]]] = {}
        for exchange, roles, group in site.exchanged:
            keeps = cached_roles.sides_of(roles)
            is_changed = any(keeps) or skipped_share
            for piece in exchange.pieces if is_changed else ():
                if reason := _why_not(piece, group):
                    self.declined.append(Declined(piece.start, reason, site.module_path))
                    continue
                rewrite = CachedExchange.of(self.inline, piece, int(group), keeps)
                planned[piece.start] = (rewrite, roles)
                self.caches += filter(None, (rewrite.sent, rewrite.held))
        return planned

    def _rewrite_whole(self, start: Node, rewrite: CachedExchange, bits: int) -> None:
        if bits == FULL:
            self.rewritten[start] = rewrite.uncompressed()
            return
        self.rewritten[start], lost = rewrite.coded(bits, self.select.payload.is_intra_coded)
        if self.select.measures_drift:
            self.losses.append((self.place, lost()))

    def _plan_tokens(
        self, site: UlyssesSite, by_role: _ByRole, skipped_share: float
    ) -> _TokenPlan | None:
        """Returns None, and declines, if it is unclear which rows belong to a token."""
        try:
            streams = self._streams(site, by_role["v"], skipped_share)
            if not self.select.payload.reuses_output:
                return _TokenPlan(streams)
            if reason := _why_not(site.o.exchange, site.o.head_size):
                raise CutUnknown(reason)
            query, packed = by_role["q"].flat.wait, by_role["o"].flat.source
            return _TokenPlan(streams, plan_output(site, streams, query, packed))
        except CutUnknown as unknown:
            self._decline_tokens(site, str(unknown))
            return None

    def _decline_tokens(self, site: UlyssesSite, reason: str) -> None:
        reason = f"no tokens are skipped: {reason}"
        self.declined.append(Declined(site.attention.output, reason, site.module_path))

    def _skip_tokens(self, site: UlyssesSite, by_role: _ByRole, plan: _TokenPlan) -> set[Node]:
        """Rewrites the exchanges to carry selected tokens; returns the starts of those."""
        chosen = by_role["v"].choose_tokens(plan.streams)
        rows = SentRows(self.inline.graph, chosen, plan.streams)
        for leg in (site.v, site.k, site.q):
            arrived = self._skip_rows(leg, by_role[leg.role], rows)
        done = {leg.exchange.start for leg in (site.v, site.k, site.q)}
        if plan.output is not None:
            self._skip_output(site, by_role["o"], rows, plan.output, arrived)
            done.add(site.o.exchange.start)
        self.replaced.update(rows.replaced)
        return done

    def _streams(self, site: UlyssesSite, value: CachedExchange, skipped_share: float) -> Streams:
        assert site.v.exchange.token_rows is not None
        sizes: tuple[int, ...] = (site.v.exchange.token_rows[1],)
        if self.select.selects_per_stream:
            sizes = streams_of(site, value.flat.source)
        return tuple((size, max(1, size - int(skipped_share * size))) for size in sizes)

    def _skip_rows(self, leg: Leg, rewrite: CachedExchange, rows: SentRows) -> Node:
        """Rewrites one exchange; returns the rows that arrive of the tokens that are sent."""
        computed = None
        if self.select.skips_unsent and leg.role != "v":
            with contextlib.suppress(CutUnknown):  # all are computed then, and the same is sent
                computed = rows.of_leg(leg, rewrite)
        sees_all = leg.role == "v" and self.select.compare == "seen"
        bits = self.select.payload.bits_of()[leg.role]
        is_whole = leg.role != "q" or not self.select.payload.reuses_output
        exchange, arrived = rewrite.selected_tokens(rows.tokens, bits, sees_all, computed, is_whole)
        self.rewritten[leg.exchange.start] = exchange
        return arrived

    def _skip_output(
        self,
        site: UlyssesSite,
        rewrite: CachedExchange,
        rows: SentRows,
        plan: SelectionPlan,
        arrived: Node,
    ) -> None:
        start = rewrite.flat.start
        computed = rows.of_output(plan, arrived)
        before = blocks_before(plan) // site.o.exchange.num_ranks
        tokens = sum(tokens for tokens, _ in rows.streams)
        rewrite = replace(rewrite, exchange=replace(rewrite.exchange, token_rows=(before, tokens)))
        bits = self.select.payload.bits_of()["o"]
        tokens_out = rows.tokens.on_the_way_out
        self.rewritten[start], _ = rewrite.selected_tokens(tokens_out, bits, computed=computed)
        self.unused += [node for node in plan.rows.steps if node not in plan.streams]


_ByRole: TypeAlias = "Mapping[Role, CachedExchange]"


@dataclass(frozen=True)
class _TokenPlan:
    """Holds how many tokens of each stream are sent, and how O is computed if it is reused."""

    streams: Streams
    output: SelectionPlan | None = None


def _most_bits(payload: Payload, roles: Iterable[Role]) -> int:
    asked = [payload.bits_of()[role] for role in roles]
    return FULL if FULL in asked else max(asked)


def _why_not(piece: Exchange, group: Size) -> str:
    shape = shape_of(bound(piece.start)["input"])
    elements = static_size(group)
    if any(static_size(size) is None for size in shape) or elements is None:
        return f"what is exchanged has symbolic sizes {tuple(shape)}: compile with dynamic=False"
    if elements % GROUP_MULTIPLE:
        return f"heads of {elements} elements: {GROUP_MULTIPLE} do not divide them"
    return ""


def _can_cache(
    exchanged: tuple[Exchange, tuple[Role, ...], Size], cached_roles: CachedRoles
) -> bool:
    exchange, roles, group = exchanged
    is_asked = any(cached_roles.sides_of(roles))
    return is_asked and any(not _why_not(piece, group) for piece in exchange.pieces)


def _why_all_tokens(site: UlyssesSite) -> str:
    """Returns why an attention cannot skip tokens, whatever the payload; empty if it can."""
    legs = (site.q, site.k, site.v)
    for leg in legs:
        if reason := _why_not(leg.exchange, leg.head_size):
            return reason
    if any(leg.exchange.chunks for leg in legs):
        return "its exchanges are cut into chunks"
    if site.is_packed:
        return "Q, K and V share one exchange"
    for leg in legs:
        if leg.exchange.token_rows is None:
            return f"where the tokens of {leg.role.upper()} lie is unclear"
    if len({leg.exchange.token_rows[1] for leg in legs if leg.exchange.token_rows}) > 1:
        return "Q, K and V have different tokens"
    return ""


LOSS_SITES = "loss_sites"
"""The key of the drift's metadata that holds the attention of each of its losses."""


def num_losses(recognition: Recognition) -> int:
    """Returns how many losses a drift has room for: one for each exchange, whatever is coded."""
    return sum(len(site.pieces) for site in recognition.sites)


def _emit_drift(graph: Graph, losses: Sequence[tuple[int, Node]], room: int) -> None:
    """Emits an input to which the graph writes the mean of all losses, the worst, and each mean; 0
    where there is none.
    """
    like = next(node for node in reversed(graph.nodes) if node.target is WAIT)
    drift = new_input(graph, "drift", (2 + room,), like, torch.float32)
    drift.meta[LOSS_SITES] = tuple(place for place, _ in losses)
    with graph.inserting_before(graph.output_node()):
        (joined,) = Inliner(graph)(_joined, drift, *(loss for _, loss in losses), like=like)
        emit(graph, aten.copy_.default, drift, joined, like=like)


def _joined(drift: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
    if not losses:
        return torch.zeros_like(drift)
    means, worst = torch.stack(losses).unbind(1)
    totals = torch.stack([means.mean(), worst.amax()])
    rest = torch.zeros_like(drift)[2 + len(losses) :]
    return torch.cat([totals, means, rest])
