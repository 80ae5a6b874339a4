"""select-v-major: send what changed since the last denoising step, and of that only so much.

Needs     recognised sites, chunks of heads and tokens made, no phases yet; what the exchanges of a
          step carry, and what all kinds of steps need to remember.
Rewrites  exchanges. In full: one stays, and both sides remember what travelled. Coded: the
          difference to what both sides expect travels instead, in few bits, or anew: the values.
          Without some tokens: Q, K and V of the tokens whose V changed least are not sent, and the
          receiver takes what it remembers; which these are, each rank tells the others. What is
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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import sort_topologically
from cocodiff_compile.graph.aten import (
    WAIT,
    aten,
    bound,
    emit,
    erase_collective,
    shape_of,
    size_bytes,
)
from cocodiff_compile.graph.delta_code import FULL, GROUP_MULTIPLE
from cocodiff_compile.graph.inline import Inliner
from cocodiff_compile.graph.layout import Size, known
from cocodiff_compile.graph.pipeline import PassResult
from cocodiff_compile.graph.records import Declined, Exchange, Recognition, Role, UlyssesSite
from cocodiff_compile.graph.remembered_exchange import RememberedExchange, new_input
from cocodiff_compile.schedule.coding_worth import CodingWorth
from cocodiff_compile.v_major.travel import Remembered, Travel


@dataclass(frozen=True)
class SelectVMajor:
    """What all exchanges carry. An exchange that serves several roles takes the most any of them
    asks for. `compare`: tokens with what was last sent of them, or with what was last seen.
    """

    travel: Travel
    remembered: Remembered
    compare: Literal["sent", "seen"] = "sent"
    measures_drift: bool = False
    budget_bytes: float | None = None
    """What may be remembered; attentions that would save least do without."""
    worth: CodingWorth | None = None
    """Tells which attentions gain nothing; None: all are taken to gain."""
    name: str = "select-v-major"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        rewriting = _Rewriting(Inliner(graph), self)
        for site, reason in self._judged(found.sites):
            if reason:
                declined = Declined(site.attention.output, reason, site.module_path)
                rewriting.declined.append(declined)
            else:
                rewriting.rewrite(site)
        if self.measures_drift and rewriting.rewritten:
            _emit_drift(graph, rewriting.losses)
        for start in rewriting.rewritten:
            erase_collective(graph, start)
        if self.travel.omitted and rewriting.rewritten:
            sort_topologically(graph)
        recognition = found.with_exchanges(rewriting.rewritten)
        note = (
            f"{len(rewriting.rewritten)} exchanges ({self.travel}) remember "
            f"{rewriting.remembered_bytes / 2**20:.2f} MiB per pass of guidance"
        )
        return PassResult(
            bool(rewriting.rewritten), recognition, tuple(rewriting.declined), (note,)
        )

    def rewrites_any(self, found: Recognition) -> bool:
        """Whether it changes a graph at all."""
        return any(
            not reason and any(_can_remember(item, self.remembered) for item in site.exchanged)
            for site, reason in self._judged(found.sites)
        )

    def _judged(self, sites: Sequence[UlyssesSite]) -> list[tuple[UlyssesSite, str]]:
        """With the reason why an attention as a whole is to travel in full. Those that send most
        remember first.
        """
        reasons = {place: self._why_no_worth(site) for place, site in enumerate(sites)}
        sizes = [self._memory_bytes(site) for site in sites]
        left = self.budget_bytes
        for place in sorted(range(len(sites)), key=lambda place: (-sizes[place], place)):
            if left is None or reasons[place]:
                continue
            if sizes[place] > left:
                room = f"no room in a memory of {self.budget_bytes} bytes: travels in full"
                reasons[place] = room
            else:
                left -= sizes[place]
        return [(site, reasons[place]) for place, site in enumerate(sites)]

    def _why_no_worth(self, site: UlyssesSite) -> str:
        return self.worth.why_not(site) if self.worth else ""

    def _memory_bytes(self, site: UlyssesSite) -> int:
        """Of one attention; what it sends, and so what it can save, grows with it."""
        total = 0
        for exchange, roles, _ in site.exchanged:
            copies = sum(self.remembered.sides_of(roles))
            total += copies * (known(exchange.size_bytes) or 0)
        return total


class _Rewriting:
    """Collects what came of each exchange."""

    def __init__(self, inline: Inliner, how: SelectVMajor) -> None:
        self.inline, self.how = inline, how
        self.rewritten: dict[Node, Exchange] = {}
        self.declined: list[Declined] = []
        self.losses: list[Node] = []
        self.memories: list[Node] = []

    @property
    def remembered_bytes(self) -> int:
        """Of all memories, which are the last inputs of the graph."""
        return sum(known(size_bytes(node)) or 0 for node in self.memories)

    def rewrite(self, site: UlyssesSite) -> None:
        planned = self._plan(site)
        omits = bool(self.how.travel.omitted)
        if omits and (reason := _why_no_tokens(site)):
            self.declined.append(Declined(site.attention.output, reason, site.module_path))
            omits = False
        if omits:
            self._omit_tokens(site, planned)
        for start, (rewrite, roles) in planned.items():
            if not omits or roles == ("o",):
                self._rewrite_whole(start, rewrite, _most_bits(self.how.travel, roles))

    def _plan(self, site: UlyssesSite) -> dict[Node, tuple[RememberedExchange, tuple[Role, ...]]]:
        """By start: what is to be rewritten, its inputs made. In the same order for every kind of
        step, so that all find their memories in the same places.
        """
        planned: dict[Node, tuple[RememberedExchange, tuple[Role, ...]]] = {}
        for exchange, roles, group in site.exchanged:
            keeps = self.how.remembered.sides_of(roles)
            for piece in exchange.pieces if any(keeps) else ():
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
        if self.how.measures_drift and not self.how.travel.is_anew:
            self.losses.append(lost())

    def _omit_tokens(
        self, site: UlyssesSite, planned: Mapping[Node, tuple[RememberedExchange, tuple[Role, ...]]]
    ) -> None:
        value, _ = planned[site.v.exchange.start]
        tokens = value.choose_tokens(self.how.travel.omitted)
        for leg in (site.v, site.q, site.k):
            start = leg.exchange.start
            sees_all = leg.role == "v" and self.how.compare == "seen"
            bits = self.how.travel.bits_of()[leg.role]
            self.rewritten[start] = planned[start][0].of_tokens(tokens, bits, sees_all)


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


def _why_no_tokens(site: UlyssesSite) -> str:
    """Why tokens are not left out; they travel by the other rules then."""
    legs = (site.q, site.k, site.v)
    for leg in legs:
        if reason := _why_not(leg.exchange, leg.head_size):
            return reason
        if leg.exchange.chunks:
            return "its exchanges are cut into chunks: no tokens are left out"
        if leg.exchange.token_rows is None:
            return f"where the tokens of {leg.role.upper()} lie is unclear: none are left out"
    if site.is_packed:
        return "Q, K and V travel together: no tokens are left out"
    if len({leg.exchange.token_rows[1] for leg in legs if leg.exchange.token_rows}) > 1:
        return "Q, K and V have different tokens: none are left out"
    return ""


def _emit_drift(graph: Graph, losses: Sequence[Node]) -> None:
    """Remembers the mean of all losses, 0 without any."""
    like = next(node for node in reversed(graph.nodes) if node.target is WAIT)
    drift = new_input(graph, "drift", (), like, torch.float32)
    with graph.inserting_before(graph.output_node()):
        (mean,) = Inliner(graph)(_mean, drift, *losses, like=like)
        emit(graph, aten.copy_.default, drift, mean, like=like)


def _mean(drift: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
    return torch.stack(losses).mean() if losses else torch.zeros_like(drift)
