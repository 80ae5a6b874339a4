# SPDX-License-Identifier: Apache-2.0
"""Emits one exchange that caches what it carried: uncompressed, coded, or of selected tokens.

    uncompressed  packed -> exchange -> received        sent = packed, held = received
    coded         packed - sent -> code -> exchange of words -> decode; held + difference = received
                  sent, held: what both sides expect next, see delta_code
    intra-coded   packed -> code -> exchange of words -> decode -> received = sent = held
    tokens        |V - sent| -> the tokens that changed most -> all-gather of their indices
                  their rows of packed -> exchange -> held with these rows replaced = received,
                  or only these rows where the receiver has no cache

Caches are graph inputs after all other inputs; the graph writes them back in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import (
    ALL_GATHER,
    ALL_TO_ALL,
    WAIT,
    aten,
    bound,
    emit,
    emit_contiguous,
    shape_of,
    size_bytes,
    value_of,
)
from cocodiff_compile.ir.collectives import AllToAll, parse_all_to_all
from cocodiff_compile.ir.inline import Inliner
from cocodiff_compile.ir.records import Exchange
from cocodiff_compile.v_major.delta_code import FULL, finite_or, lost_shares, send, update
from cocodiff_compile.v_major.token_rows import changed_most, put_tokens, take_tokens


@dataclass(frozen=True)
class SentTokens:
    """Holds the indices of sent tokens: this rank's, [1, count], and all ranks', [P, count]."""

    own: Node
    everyones: Node

    @property
    def on_the_way_out(self) -> SentTokens:
        """The tokens of O's exchange, which sends rows of everyone's and receives its own."""
        return SentTokens(self.everyones, self.own)


@dataclass(frozen=True)
class CachedExchange:
    """Rewrites one exchange. Its caches are [P, n, group]; a side that needs no cache has None."""

    inline: Inliner
    exchange: Exchange
    flat: AllToAll
    group: int
    """The number of elements that share a scale."""
    sent: Node | None
    held: Node | None

    @classmethod
    def of(
        cls, inline: Inliner, exchange: Exchange, group: int, keeps: tuple[bool, bool]
    ) -> CachedExchange:
        flat = parse_all_to_all(exchange.start)
        assert flat is not None, "a recognised exchange has a wait"
        rows = value_of(flat.source).numel() // (exchange.num_ranks * group)
        shape = (exchange.num_ranks, rows, group)
        sent, held = (
            new_input(inline.graph, f"{what}_{exchange.start.name}", shape, flat.source)
            if keep
            else None
            for what, keep in zip(("sent", "held"), keeps, strict=True)
        )
        return cls(inline, exchange, flat, group, sent, held)

    @property
    def graph(self) -> Graph:
        return self.inline.graph

    def uncompressed(self) -> Exchange:
        """Emits the exchange as it was, and caches the finite values it carries."""
        with self.graph.inserting_before(self.flat.start):
            source = emit_contiguous(self.graph, self.flat.source)
            self._store(self.sent, self._call(finite_or, self._in_groups(source), 0.0))
            splits = bound(self.flat.start)["input_split_sizes"]
            start = self._emit(ALL_TO_ALL, source, splits, splits, self.flat.group)
        with self.graph.inserting_before(self.flat.wait):
            received = self._emit(WAIT, start)
            self._store(self.held, self._call(finite_or, self._in_groups(received), 0.0))
        return self._replaced(start, received, received)

    def coded(self, bits: int, is_intra_coded: bool) -> tuple[Exchange, Callable[[], Node]]:
        """Emits the coded exchange. Returns it and a function that, if called, emits the mean and
        the worst share of its energy that a head of a token loses.
        """
        with self.graph.inserting_before(self.flat.start):
            packed = self._in_groups(emit_contiguous(self.graph, self.flat.source))
            # Intra coding uses only the shape of the caches.
            sent, held = (packed, packed) if is_intra_coded else self._both()
            coded, expected, arriving = self._call(send, packed, sent, bits, is_intra_coded)
            self._store(self.sent, expected)
            start = self._exchange(coded)
        with self.graph.inserting_before(self.flat.wait):
            wait = self._emit(WAIT, start)
            new, arrived = self._call(update, held, wait, bits, is_intra_coded)
            self._store(self.held, new)
            result = self._emit(aten.view.default, arrived, list(shape_of(self.flat.source)))

        def lost() -> Node:
            with self.graph.inserting_before(start):
                shares: Node = self._call(lost_shares, packed, arriving)
                return shares

        return self._replaced(start, wait, result), lost

    def choose_tokens(self, streams: tuple[tuple[int, int], ...]) -> SentTokens:
        """Emits the choice of the tokens whose rows of this exchange changed most. `streams` holds
        (tokens, number to choose) of each stream.
        """
        assert self.sent is not None, "selecting tokens requires the cache of the sent V"
        with self.graph.inserting_before(self.flat.start):
            packed = self._by_token(emit_contiguous(self.graph, self.flat.source))
            own = self._call(changed_most, packed, self._by_token(self.sent), streams)
            num_ranks = self.exchange.num_ranks
            gathering = self._emit(ALL_GATHER, own, num_ranks, self.flat.group)
            return SentTokens(own, self._emit(WAIT, gathering))

    def selected_tokens(
        self,
        tokens: SentTokens,
        bits: int,
        sees_all: bool = False,
        computed: Node | None = None,
        is_whole: bool = True,
    ) -> tuple[Exchange, Node]:
        """Emits the exchange of selected tokens, uncompressed or coded; returns it and the rows
        that arrive.

        `computed` holds the rows of these tokens where only they are computed. With `sees_all` the
        sender caches all tokens as if they were sent. With `is_whole` the readers of the exchange
        go on reading all tokens; otherwise nothing reads it.
        """
        with self.graph.inserting_before(self.flat.start):
            rows, seen = self._rows(tokens, computed), None
            if sees_all:
                seen = self._by_token(emit_contiguous(self.graph, self.flat.source))
            if bits == FULL:
                start = self._exchange(rows)
                self._store_sent_tokens(tokens, rows, seen)
            else:
                start = self._send_coded_tokens(tokens, rows, bits)
        with self.graph.inserting_before(self.flat.wait):
            wait = self._emit(WAIT, start)
            arrived = self._receive_tokens(tokens, wait, bits)
            if not is_whole:
                return self._recorded(start, wait, arrived), arrived
            assert self.held is not None, "skipped tokens require a cache at the receiver"
            held = self._by_token(self.held)
            result = self._call(put_tokens, held, tokens.everyones, arrived)
            result = self._emit(aten.view.default, result, list(shape_of(self.flat.source)))
        return self._replaced(start, wait, result), arrived

    def _receive_tokens(self, tokens: SentTokens, wait: Node, bits: int) -> Node:
        """Returns the rows that arrived, and writes them to the receiver's cache if it has one."""
        if self.held is None:
            return wait
        held = self._by_token(self.held)
        old = self._call(take_tokens, held, tokens.everyones)
        if bits == FULL:
            new, arrived = self._call(finite_or, wait, old), wait
        else:
            new, arrived = self._call(_update_rows, old, wait, self.group, bits)
        self._store(self.held, self._call(put_tokens, held, tokens.everyones, new))
        return arrived

    def _rows(self, tokens: SentTokens, computed: Node | None) -> Node:
        """Returns the rows to send, [P, before, count, behind]."""
        if computed is None:
            packed = self._by_token(emit_contiguous(self.graph, self.flat.source))
            rows: Node = self._call(take_tokens, packed, tokens.own)
            return rows
        assert self.exchange.token_rows is not None
        count = shape_of(tokens.own)[-1]
        shape = [self.exchange.num_ranks, self.exchange.token_rows[0], count, -1]
        return self._emit(aten.reshape.default, computed, shape)

    def _store_sent_tokens(self, tokens: SentTokens, rows: Node, seen: Node | None) -> None:
        if self.sent is None:
            return
        sent = self._by_token(self.sent)
        if seen is not None:
            self._store(self.sent, self._call(finite_or, seen, sent))
            return
        old = self._call(take_tokens, sent, tokens.own)
        new = self._call(finite_or, rows, old)
        self._store(self.sent, self._call(put_tokens, sent, tokens.own, new))

    def _send_coded_tokens(self, tokens: SentTokens, rows: Node, bits: int) -> Node:
        sent, _ = self._both()
        by_token = self._by_token(sent)
        old = self._call(take_tokens, by_token, tokens.own)
        coded, new = self._call(_send_rows, rows, old, self.group, bits)
        self._store(sent, self._call(put_tokens, by_token, tokens.own, new))
        return self._exchange(coded)

    def _both(self) -> tuple[Node, Node]:
        assert self.sent is not None and self.held is not None, (
            "coding differences requires both caches"
        )
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
        """Returns a view [P, n, group]."""
        return self._emit(aten.view.default, packed, [self.exchange.num_ranks, -1, self.group])

    def _by_token(self, packed: Node) -> Node:
        """Returns a view [P, before, tokens, behind]."""
        assert self.exchange.token_rows is not None
        shape = [self.exchange.num_ranks, *self.exchange.token_rows, -1]
        return self._emit(aten.view.default, packed, shape)

    def _store(self, cache: Node | None, value: Node) -> None:
        if cache is not None:
            value = self._emit(aten.view.default, value, list(shape_of(cache)))
            self._emit(aten.copy_.default, cache, value)

    def _replaced(self, start: Node, wait: Node, result: Node) -> Exchange:
        self.flat.wait.replace_all_uses_with(result)
        return self._recorded(start, wait, result)

    def _recorded(self, start: Node, wait: Node, result: Node) -> Exchange:
        is_raw = self.exchange.result is self.flat.wait
        return replace(
            self.exchange,
            start=start,
            wait=wait,
            result=result if is_raw else self.exchange.result,
            size_bytes=size_bytes(start.all_input_nodes[0]),
        )


def _send_rows(
    rows: torch.Tensor, old: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(rows), -1, group)
    coded, expected, _ = send(rows.reshape(shape), old.reshape(shape), bits)
    return coded, expected.view(rows.shape)


def _update_rows(
    old: torch.Tensor, coded: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    new, arrived = update(old.reshape(len(old), -1, group), coded, bits)
    return new.view(old.shape), arrived.view(old.shape)


def new_input(
    graph: Graph, name: str, shape: tuple[int, ...], like: Node, dtype: torch.dtype | None = None
) -> Node:
    """Appends a placeholder after all others."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(name)
    fake = value_of(like)
    with fake.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(shape, dtype=dtype or fake.dtype, device=fake.device)
    return node
