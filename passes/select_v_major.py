"""select-v-major: send what changed since the last denoising step, and of that only so much.

Needs     recognised sites, chunks of heads and tokens made, no phases yet; what the exchanges of a
          step carry, and what all kinds of steps need to remember.
Rewrites  exchanges. In full: one stays, and both sides remember what travelled. Coded: the
          difference to what both sides expect travels instead, in few bits.
          Without some tokens: Q, K and V of the tokens whose V changed least are not sent, and the
          receiver takes what it remembers; which these are, each rank tells the others. What is
          remembered are graph inputs, behind all others, that the graph writes back into.
Keeps     every value, bit for bit, where all travels in full. Otherwise values change: this pass
          is lossy, and off unless asked for. What is not finite is not remembered; it arrives as
          it is, and as NaN if it was to be coded.
Declines  an exchange with symbolic sizes, or with heads whose size is no multiple of 8. Tokens are
          left out only where they can be told apart in each of three exchanges, not in chunks.

    in full   packed -> exchange -> received            sent = packed, held = received
    coded     packed - sent -> code -> exchange of bytes -> decode -> held + difference = received
              sent, held: what both expect next, see delta_code
    tokens    |V - sent| -> those that changed most -> all-gather
              packed of those -> exchange -> held with those replaced = received
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import sort_topologically
from cocodiff_compile.graph.aten import (
    ALL_GATHER,
    ALL_TO_ALL,
    WAIT,
    AllToAll,
    aten,
    bound,
    emit,
    emit_contiguous,
    erase_collective,
    parse_all_to_all,
    shape_of,
    size_bytes,
    value_of,
)
from cocodiff_compile.graph.delta_code import (
    FULL,
    GROUP_MULTIPLE,
    advance,
    finite,
    lost_share,
    pack,
    quantize,
    update,
)
from cocodiff_compile.graph.inline import Inliner
from cocodiff_compile.graph.layout import Size, known
from cocodiff_compile.graph.pipeline import PassResult
from cocodiff_compile.graph.records import Declined, Exchange, Recognition, Role, UlyssesSite
from cocodiff_compile.graph.token_rows import (
    changed_most,
    finite_or,
    put_received,
    put_sent,
    take_received,
    take_tokens,
)
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
    name: str = "select-v-major"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        rewriting = _Rewriting(Inliner(graph), self)
        with_room = self._with_room(found.sites)
        for place, site in enumerate(found.sites):
            if place in with_room:
                rewriting.rewrite(site)
            else:
                reason = f"no room in a memory of {self.budget_bytes} bytes: travels in full"
                declined = Declined(site.attention.output, reason, site.module_path)
                rewriting.declined.append(declined)
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

    def _with_room(self, sites: Sequence[UlyssesSite]) -> set[int]:
        """Places of the attentions that may remember, those that send most first."""
        if self.budget_bytes is None:
            return set(range(len(sites)))
        sizes = [self._memory_bytes(site) for site in sites]
        left, found = self.budget_bytes, set()
        for place in sorted(range(len(sites)), key=lambda place: (-sizes[place], place)):
            if sizes[place] <= left:
                left -= sizes[place]
                found.add(place)
        return found

    def _memory_bytes(self, site: UlyssesSite) -> int:
        """Of one attention; what it sends, and so what it can save, grows with it."""
        total = 0
        for exchange, roles, _ in _exchanges(site):
            sides = (self.remembered.sent, self.remembered.held)
            copies = sum(not side.isdisjoint(roles) for side in sides)
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

    def _plan(self, site: UlyssesSite) -> dict[Node, tuple[_Rewrite, tuple[Role, ...]]]:
        """By start: what is to be rewritten, its inputs made. In the same order for every kind of
        step, so that all find their memories in the same places.
        """
        planned: dict[Node, tuple[_Rewrite, tuple[Role, ...]]] = {}
        remembered = self.how.remembered
        for exchange, roles, group in _exchanges(site):
            keeps = (not remembered.sent.isdisjoint(roles), not remembered.held.isdisjoint(roles))
            for piece in exchange.pieces if any(keeps) else ():
                if reason := _why_not(piece, group):
                    self.declined.append(Declined(piece.start, reason, site.module_path))
                    continue
                rewrite = _Rewrite.of(self.inline, piece, int(group), keeps)
                planned[piece.start] = (rewrite, roles)
                self.memories += filter(None, (rewrite.sent, rewrite.held))
        return planned

    def _rewrite_whole(self, start: Node, rewrite: _Rewrite, bits: int) -> None:
        if bits == FULL:
            self.rewritten[start] = rewrite.in_full()
            return
        self.rewritten[start], lost = rewrite.coded(bits)
        if self.how.measures_drift:
            self.losses.append(lost())

    def _omit_tokens(
        self, site: UlyssesSite, planned: Mapping[Node, tuple[_Rewrite, tuple[Role, ...]]]
    ) -> None:
        value, _ = planned[site.v.exchange.start]
        tokens = value.choose_tokens(self.how.travel.omitted)
        for leg in (site.v, site.q, site.k):
            start = leg.exchange.start
            sees_all = leg.role == "v" and self.how.compare == "seen"
            bits = self.how.travel.bits_of()[leg.role]
            self.rewritten[start] = planned[start][0].of_tokens(tokens, bits, sees_all)


def _exchanges(site: UlyssesSite) -> list[tuple[Exchange, tuple[Role, ...], Size]]:
    """Each exchange once, with the roles it serves and the elements of a head."""
    found: dict[Node, tuple[Exchange, tuple[Role, ...], Size]] = {}
    for leg in site.legs:
        start = leg.exchange.start
        roles = found[start][1] if start in found else ()
        found[start] = (leg.exchange, (*roles, leg.role), leg.head_size)
    return list(found.values())


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


@dataclass(frozen=True)
class _Tokens:
    """Those that are sent: this rank's, and all ranks'."""

    own: Node
    everyones: Node
    count: int


@dataclass(frozen=True)
class _Rewrite:
    """One exchange. Memories are [P, n, group]; None if this side need not remember."""

    inline: Inliner
    exchange: Exchange
    flat: AllToAll
    group: int
    """Elements that share a step."""
    sent: Node | None
    held: Node | None

    @classmethod
    def of(
        cls, inline: Inliner, exchange: Exchange, group: int, keeps: tuple[bool, bool]
    ) -> _Rewrite:
        flat = parse_all_to_all(exchange.start)
        assert flat is not None, "a recognised exchange has its wait"
        rows = value_of(flat.source).numel() // (exchange.num_ranks * group)
        shape = (exchange.num_ranks, rows, group)
        sent, held = (
            _new_input(inline.graph, f"{what}_{exchange.start.name}", shape, flat.source)
            if keep
            else None
            for what, keep in zip(("sent", "held"), keeps, strict=True)
        )
        return cls(inline, exchange, flat, group, sent, held)

    @property
    def graph(self) -> Graph:
        return self.inline.graph

    def in_full(self) -> Exchange:
        """As it was; what is finite of it is remembered."""
        with self.graph.inserting_before(self.flat.start):
            source = emit_contiguous(self.graph, self.flat.source)
            self._remember(self.sent, self._call(finite, self._in_groups(source)))
            splits = bound(self.flat.start)["input_split_sizes"]
            start = self._emit(ALL_TO_ALL, source, splits, splits, self.flat.group)
        with self.graph.inserting_before(self.flat.wait):
            received = self._emit(WAIT, start)
            self._remember(self.held, self._call(finite, self._in_groups(received)))
        return self._replaced(start, received, received)

    def coded(self, bits: int) -> tuple[Exchange, Callable[[], Node]]:
        """And what gives, if it is called, the share of the energy sent that is lost."""
        sent, held = self._both()
        with self.graph.inserting_before(self.flat.start):
            packed = self._in_groups(emit_contiguous(self.graph, self.flat.source))
            coded, expected, arriving = self._call(_send, packed, sent, bits)
            self._remember(sent, expected)
            start = self._exchange(coded)
        with self.graph.inserting_before(self.flat.wait):
            wait = self._emit(WAIT, start)
            new, arrived = self._call(update, held, wait, bits)
            self._remember(held, new)
            result = self._emit(aten.view.default, arrived, list(shape_of(self.flat.source)))

        def lost() -> Node:
            with self.graph.inserting_before(start):
                share: Node = self._call(lost_share, packed, arriving)
                return share

        return self._replaced(start, wait, result), lost

    def choose_tokens(self, omitted: float) -> _Tokens:
        """Those whose rows of this exchange changed most; at least one is always sent."""
        assert self.exchange.token_rows is not None and self.sent is not None
        tokens = self.exchange.token_rows[1]
        count = max(1, tokens - int(omitted * tokens))
        with self.graph.inserting_before(self.flat.start):
            packed = self._by_token(emit_contiguous(self.graph, self.flat.source))
            own = self._call(changed_most, packed, self._by_token(self.sent), count)
            num_ranks = self.exchange.num_ranks
            gathering = self._emit(ALL_GATHER, own, num_ranks, self.flat.group)
            return _Tokens(own, self._emit(WAIT, gathering), count)

    def of_tokens(self, tokens: _Tokens, bits: int, sees_all: bool) -> Exchange:
        """Of some tokens, as they are or coded. `sees_all`: all are remembered as if sent."""
        assert self.held is not None, "what is not sent must be remembered"
        with self.graph.inserting_before(self.flat.start):
            packed = self._by_token(emit_contiguous(self.graph, self.flat.source))
            rows = self._call(take_tokens, packed, tokens.own)
            rows = emit_contiguous(self.graph, rows)
            if bits == FULL:
                start = self._exchange(rows)
                self._remember_sent_tokens(packed, tokens, rows, sees_all)
            else:
                start = self._send_coded_tokens(tokens, rows, bits)
        with self.graph.inserting_before(self.flat.wait):
            wait = self._emit(WAIT, start)
            held = self._by_token(self.held)
            old = self._call(take_received, held, tokens.everyones)
            if bits == FULL:
                new, arrived = self._call(finite_or, wait, old), wait
            else:
                new, arrived = self._call(_update_rows, old, wait, self.group, bits)
            result = self._call(put_received, held, tokens.everyones, arrived)
            result = self._emit(aten.view.default, result, list(shape_of(self.flat.source)))
            self._remember(self.held, self._call(put_received, held, tokens.everyones, new))
        return self._replaced(start, wait, result)

    def _remember_sent_tokens(
        self, packed: Node, tokens: _Tokens, rows: Node, sees_all: bool
    ) -> None:
        if self.sent is None:
            return
        sent = self._by_token(self.sent)
        if sees_all:
            self._remember(self.sent, self._call(finite_or, packed, sent))
            return
        old = self._call(take_tokens, sent, tokens.own)
        new = self._call(finite_or, rows, old)
        self._remember(self.sent, self._call(put_sent, sent, tokens.own, new))

    def _send_coded_tokens(self, tokens: _Tokens, rows: Node, bits: int) -> Node:
        sent, _ = self._both()
        by_token = self._by_token(sent)
        old = self._call(take_tokens, by_token, tokens.own)
        coded, new = self._call(_send_rows, rows, old, self.group, bits)
        self._remember(sent, self._call(put_sent, by_token, tokens.own, new))
        return self._exchange(coded)

    def _both(self) -> tuple[Node, Node]:
        assert self.sent is not None and self.held is not None, "what is coded is remembered"
        return self.sent, self.held

    def _emit(self, target: Callable[..., Any], *args: Any) -> Node:
        return emit(self.graph, target, *args, like=self.flat.source)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        results = self.inline(function, *args, like=self.flat.source)
        return results[0] if len(results) == 1 else results

    def _exchange(self, packed: Node) -> Node:
        ones = [1] * self.exchange.num_ranks
        return self._emit(ALL_TO_ALL, packed, ones, ones, self.flat.group)

    def _in_groups(self, packed: Node) -> Node:
        """[P, n, group]"""
        return self._emit(aten.view.default, packed, [self.exchange.num_ranks, -1, self.group])

    def _by_token(self, packed: Node) -> Node:
        """[P, before, tokens, behind]"""
        assert self.exchange.token_rows is not None
        shape = [self.exchange.num_ranks, *self.exchange.token_rows, -1]
        return self._emit(aten.view.default, packed, shape)

    def _remember(self, memory: Node | None, value: Node) -> None:
        if memory is not None:
            value = self._emit(aten.view.default, value, list(shape_of(memory)))
            self._emit(aten.copy_.default, memory, value)

    def _replaced(self, start: Node, wait: Node, result: Node) -> Exchange:
        old_wait = self.flat.wait
        old_wait.replace_all_uses_with(result)
        return replace(
            self.exchange,
            start=start,
            wait=wait,
            result=result if self.exchange.result is old_wait else self.exchange.result,
            size_bytes=size_bytes(start.all_input_nodes[0]),
        )


def _send(
    packed: torch.Tensor, sent: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes to send, what is remembered of them from now on, and what will arrive."""
    number, code = quantize(packed.to(torch.float32) - sent.to(torch.float32), bits)
    return pack(number, code, bits), *advance(sent, number, code, bits)


def _send_rows(
    rows: torch.Tensor, old: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(rows), -1, group)
    coded, expected, _ = _send(rows.reshape(shape), old.reshape(shape), bits)
    return coded, expected.view(rows.shape)


def _update_rows(
    old: torch.Tensor, coded: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    new, arrived = update(old.reshape(len(old), -1, group), coded, bits)
    return new.view(old.shape), arrived.view(old.shape)


def _new_input(
    graph: Graph,
    name: str,
    shape: tuple[int, ...],
    like: Node,
    dtype: torch.dtype | None = None,
) -> Node:
    """Behind all others."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(name)
    fake = value_of(like)
    with fake.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(shape, dtype=dtype or fake.dtype, device=fake.device)
    return node


def _emit_drift(graph: Graph, losses: Sequence[Node]) -> None:
    """Remembers the mean of all losses, 0 without any."""
    like = next(node for node in reversed(graph.nodes) if node.target is WAIT)
    drift = _new_input(graph, "drift", (), like, torch.float32)
    with graph.inserting_before(graph.output_node()):
        (mean,) = Inliner(graph)(_mean, drift, *losses, like=like)
        emit(graph, aten.copy_.default, drift, mean, like=like)


def _mean(drift: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
    return torch.stack(losses).mean() if losses else torch.zeros_like(drift)
