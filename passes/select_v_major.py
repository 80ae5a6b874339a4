"""select-v-major: send what changed since the last denoising step, and of that only so much.

Needs     recognised sites, chunks of heads and tokens made, no phases yet; what the exchanges of a
          step carry, and what all kinds of steps need to remember.
Rewrites  exchanges. In full: one stays, and both sides remember what travelled. Coded: the
          difference to what both sides expect travels instead, in few bits, or anew: the values.
          Without some tokens: Q, K and V of the tokens whose V changed least are not sent, and the
          receiver takes what it remembers; which these are, each rank tells the others. Their Q
          and K are not computed either, nor, if their output is reused, their O. What is
          remembered are graph inputs, behind all others, that the graph writes back into.
Keeps     every value, bit for bit, where all travels in full. Otherwise values change: this pass
          is lossy, and off unless asked for. What is not finite is not remembered; it arrives as
          it is, and as NaN if it was to be coded.
Declines  an exchange with symbolic sizes, or with heads whose size is no multiple of 8. Tokens are
          left out only where they can be told apart in each of three exchanges, not in chunks.
          An attention for which there is no room, or for which coding would take longer than it
          saves.
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
from cocodiff_compile.ir.aten import (
    WAIT,
    aten,
    bound,
    emit,
    shape_of,
    size_bytes,
    waits_behind,
)
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.inline import Inliner
from cocodiff_compile.ir.layout import Size, known
from cocodiff_compile.ir.records import (
    Declined,
    Exchange,
    Leg,
    Recognition,
    Role,
    UlyssesSite,
    with_nodes,
)
from cocodiff_compile.v_major.delta_code import FULL, GROUP_MULTIPLE
from cocodiff_compile.v_major.remembered_exchange import RememberedExchange, new_input
from cocodiff_compile.v_major.sent_rows import SentRows, Streams, plan_output, streams_of
from cocodiff_compile.v_major.travel import Remembered, Travel


@dataclass(frozen=True)
class SelectVMajor:
    """What all exchanges carry. An exchange that serves several roles takes the most any of them
    asks for. `compare`: tokens with what was last sent of them, or with what was last seen.
    """

    travel: Travel
    remembered: Remembered
    compare: Literal["sent", "seen"] = "sent"
    streams_apart: bool = False
    """Tokens of each stream, text and image say, are chosen from on their own."""
    skips_unsent: bool = False
    """What is only sent is computed only of tokens that are."""
    layers: tuple[float, ...] = ()
    """How much of the share that is left out each attention leaves out; none: all of it."""
    measures_drift: bool = False
    uncoded: tuple[str, ...] = ()
    """For each attention the reason why it is left as it is; empty where it is not."""
    name: str = "select-v-major"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        rewriting = _Rewriting(Inliner(graph), self)
        self.check_layers(found.sites)
        for place, site in enumerate(found.sites):
            if reason := self._why_uncoded(place):
                declined = Declined(site.attention.output, reason, site.module_path)
                rewriting.declined.append(declined)
            else:
                remembered = self.remembered_of(place, site)
                rewriting.rewrite(site, remembered, self._omitted(place))
        if self.measures_drift and rewriting.rewritten:
            _emit_drift(graph, rewriting.losses)
        rewriting.erase()
        if self.travel.omitted and rewriting.rewritten:
            sort_topologically(graph)
        recognition = found.with_exchanges(rewriting.rewritten)
        recognition = with_nodes(recognition, rewriting.replaced)
        note = (
            f"{len(rewriting.rewritten)} exchanges ({self.travel}) remember "
            f"{rewriting.remembered_bytes / 2**20:.2f} MiB per pass of guidance"
        )
        return PassResult(
            bool(rewriting.rewritten), recognition, tuple(rewriting.declined), (note,)
        )

    def rewrites_any(self, found: Recognition) -> bool:
        """Whether it changes a graph at all."""
        self.check_layers(found.sites)
        return any(
            not self._why_uncoded(place)
            and any(_can_remember(item, self.remembered_of(place, site)) for item in site.exchanged)
            for place, site in enumerate(found.sites)
        )

    def _why_uncoded(self, place: int) -> str:
        return self.uncoded[place] if self.uncoded else ""

    def _omitted(self, place: int) -> float:
        """The share of tokens that an attention does not send."""
        return self.travel.omitted * (self.layers[place] if self.layers else 1.0)

    def remembered_of(self, place: int, site: UlyssesSite) -> Remembered:
        """What is remembered of one attention, the same for every kind of step."""
        is_whole = bool(self.layers) and not self.layers[place]
        if is_whole or _why_all_tokens(site):
            return self.remembered.of_all_tokens
        return self.remembered

    def check_layers(self, sites: Sequence[UlyssesSite]) -> None:
        if self.layers and len(self.layers) != len(sites):
            raise UserError(
                f"option 'v_major': 'layers' has {len(self.layers)} numbers, and a graph has "
                f"{len(sites)} attentions; give one for each"
            )


class _Rewriting:
    """Collects what came of each exchange."""

    def __init__(self, inline: Inliner, how: SelectVMajor) -> None:
        self.inline, self.how = inline, how
        self.rewritten: dict[Node, Exchange] = {}
        self.declined: list[Declined] = []
        self.losses: list[Node] = []
        self.memories: list[Node] = []
        self.replaced: dict[Node, Node] = {}
        self.unused: list[Node] = []
        """What nothing reads any more."""

    @property
    def remembered_bytes(self) -> int:
        """Of all memories, which are the last inputs of the graph."""
        return sum(known(size_bytes(node)) or 0 for node in self.memories)

    def rewrite(self, site: UlyssesSite, remembered: Remembered, omitted: float) -> None:
        """`omitted`: the share of tokens that are not sent."""
        if omitted and (reason := _why_all_tokens(site)):
            self._decline_tokens(site, reason)
            omitted = 0.0
        planned = self._plan(site, remembered, omitted)
        by_role = {role: rewrite for rewrite, roles in planned.values() for role in roles}
        tokens = self._plan_tokens(site, by_role, omitted) if omitted else None
        done = self._omit_tokens(site, by_role, tokens) if tokens else set()
        for start, (rewrite, roles) in planned.items():
            if start not in done:
                self._rewrite_whole(start, rewrite, _most_bits(self.how.travel, roles))

    def erase(self) -> None:
        """What was rewritten, users first; waits are side effects, which nothing else removes."""
        for start in self.rewritten:
            self.unused += [start, *waits_behind(start)]
        for node in sorted(self.unused, reverse=True):
            self.inline.graph.erase_node(node)

    def _plan(
        self, site: UlyssesSite, remembered: Remembered, omitted: float
    ) -> dict[Node, tuple[RememberedExchange, tuple[Role, ...]]]:
        """By start: what is to be rewritten, its inputs made. In the same order for every kind of
        step, so that all find their memories in the same places.
        """
        planned: dict[Node, tuple[RememberedExchange, tuple[Role, ...]]] = {}
        for exchange, roles, group in site.exchanged:
            keeps = remembered.sides_of(roles)
            is_changed = any(keeps) or omitted
            for piece in exchange.pieces if is_changed else ():
                if reason := _why_not(piece, group):
                    self.declined.append(Declined(piece.start, reason, site.module_path))
                    continue
                rewrite = RememberedExchange.of(self.inline, piece, int(group), keeps)
                planned[piece.start] = (rewrite, roles)
                self.memories += filter(None, (rewrite.sent, rewrite.held))
        return planned

    def _rewrite_whole(self, start: Node, rewrite: RememberedExchange, bits: int) -> None:
        if bits == FULL:
            self.rewritten[start] = rewrite.in_full()
            return
        self.rewritten[start], lost = rewrite.coded(bits, self.how.travel.is_anew)
        if self.how.measures_drift:
            self.losses.append(lost())

    def _plan_tokens(
        self, site: UlyssesSite, by_role: _ByRole, omitted: float
    ) -> _TokenPlan | None:
        """None, and why not, if it cannot be told which rows are those of a token."""
        try:
            streams = self._streams(site, by_role["v"], omitted)
            if not self.how.travel.reuses_output:
                return _TokenPlan(streams)
            if reason := _why_not(site.o.exchange, site.o.head_size):
                raise CutUnknown(reason)
            query, packed = by_role["q"].flat.wait, by_role["o"].flat.source
            return _TokenPlan(streams, plan_output(site, streams, query, packed))
        except CutUnknown as unknown:
            self._decline_tokens(site, str(unknown))
            return None

    def _decline_tokens(self, site: UlyssesSite, reason: str) -> None:
        reason = f"no tokens are left out: {reason}"
        self.declined.append(Declined(site.attention.output, reason, site.module_path))

    def _omit_tokens(self, site: UlyssesSite, by_role: _ByRole, plan: _TokenPlan) -> set[Node]:
        """The starts of all exchanges that are rewritten so."""
        chosen = by_role["v"].choose_tokens(plan.streams)
        rows = SentRows(self.inline.graph, chosen, plan.streams)
        for leg in (site.v, site.k, site.q):
            arrived = self._omit_rows(leg, by_role[leg.role], rows)
        done = {leg.exchange.start for leg in (site.v, site.k, site.q)}
        if plan.output is not None:
            self._omit_output(site, by_role["o"], rows, plan.output, arrived)
            done.add(site.o.exchange.start)
        self.replaced.update(rows.replaced)
        return done

    def _streams(self, site: UlyssesSite, value: RememberedExchange, omitted: float) -> Streams:
        assert site.v.exchange.token_rows is not None
        sizes: tuple[int, ...] = (site.v.exchange.token_rows[1],)
        if self.how.streams_apart:
            sizes = streams_of(site, value.flat.source)
        return tuple((size, max(1, size - int(omitted * size))) for size in sizes)

    def _omit_rows(self, leg: Leg, rewrite: RememberedExchange, rows: SentRows) -> Node:
        """What arrives of the tokens that are sent."""
        computed = None
        if self.how.skips_unsent and leg.role != "v":
            with contextlib.suppress(CutUnknown):  # all are computed then, and the same is sent
                computed = rows.of_leg(leg, rewrite)
        sees_all = leg.role == "v" and self.how.compare == "seen"
        bits = self.how.travel.bits_of()[leg.role]
        is_whole = leg.role != "q" or not self.how.travel.reuses_output
        exchange, arrived = rewrite.of_tokens(rows.tokens, bits, sees_all, computed, is_whole)
        self.rewritten[leg.exchange.start] = exchange
        return arrived

    def _omit_output(
        self,
        site: UlyssesSite,
        rewrite: RememberedExchange,
        rows: SentRows,
        plan: SelectionPlan,
        arrived: Node,
    ) -> None:
        start = rewrite.flat.start
        computed = rows.of_output(plan, arrived)
        before = blocks_before(plan) // site.o.exchange.num_ranks
        tokens = sum(tokens for tokens, _ in rows.streams)
        rewrite = replace(rewrite, exchange=replace(rewrite.exchange, token_rows=(before, tokens)))
        bits = self.how.travel.bits_of()["o"]
        tokens_out = rows.tokens.on_the_way_out
        self.rewritten[start], _ = rewrite.of_tokens(tokens_out, bits, computed=computed)
        self.unused += [node for node in plan.rows.steps if node not in plan.streams]


_ByRole: TypeAlias = "Mapping[Role, RememberedExchange]"


@dataclass(frozen=True)
class _TokenPlan:
    """How many tokens of which streams are sent; and how O is computed of them, if it is."""

    streams: Streams
    output: SelectionPlan | None = None


def _most_bits(travel: Travel, roles: Iterable[Role]) -> int:
    asked = [travel.bits_of()[role] for role in roles]
    return FULL if FULL in asked else max(asked)


def _why_not(piece: Exchange, group: Size) -> str:
    shape = shape_of(bound(piece.start)["input"])
    elements = known(group)
    if any(known(size) is None for size in shape) or elements is None:
        return f"what is exchanged has symbolic sizes {tuple(shape)}: compile with dynamic=False"
    if elements % GROUP_MULTIPLE:
        return f"heads of {elements} elements: {GROUP_MULTIPLE} do not divide them"
    return ""


def _can_remember(
    exchanged: tuple[Exchange, tuple[Role, ...], Size], remembered: Remembered
) -> bool:
    exchange, roles, group = exchanged
    is_asked = any(remembered.sides_of(roles))
    return is_asked and any(not _why_not(piece, group) for piece in exchange.pieces)


def _why_all_tokens(site: UlyssesSite) -> str:
    """Why tokens cannot be told apart, in whatever kind of step: all travel, by the other rules."""
    legs = (site.q, site.k, site.v)
    for leg in legs:
        if reason := _why_not(leg.exchange, leg.head_size):
            return reason
    if any(leg.exchange.chunks for leg in legs):
        return "its exchanges are cut into chunks"
    if site.is_packed:
        return "Q, K and V travel together"
    for leg in legs:
        if leg.exchange.token_rows is None:
            return f"where the tokens of {leg.role.upper()} lie is unclear"
    if len({leg.exchange.token_rows[1] for leg in legs if leg.exchange.token_rows}) > 1:
        return "Q, K and V have different tokens"
    return ""


def _emit_drift(graph: Graph, losses: Sequence[Node]) -> None:
    """Remembers what all exchanges lost: the mean of their means, and the worst; 0 without any."""
    like = next(node for node in reversed(graph.nodes) if node.target is WAIT)
    drift = new_input(graph, "drift", (2,), like, torch.float32)
    with graph.inserting_before(graph.output_node()):
        (joined,) = Inliner(graph)(_joined, drift, *losses, like=like)
        emit(graph, aten.copy_.default, drift, joined, like=like)


def _joined(drift: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
    if not losses:
        return torch.zeros_like(drift)
    means, worst = torch.stack(losses).unbind(1)
    return torch.stack([means.mean(), worst.amax()])
