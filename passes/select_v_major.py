"""select-v-major: send what changed since the last denoising step, in few bits.

Needs     recognised sites, chunks of heads and tokens made, no phases yet; what the exchanges of a
          step carry.
Rewrites  every exchange. In full: it stays, and both sides remember what travelled. Coded: the
          difference to what both sides remember travels instead, as bytes, and is remembered. What
          is remembered are graph inputs, behind all others, that the graph writes back into.
Keeps     every value, bit for bit, where all travels in full. Coded, values change: this pass is
          lossy, and off unless asked for. What is not finite arrives as NaN and is not remembered.
Declines  an exchange with symbolic sizes, or with heads whose size is no multiple of 8.

    in full   packed -> exchange -> received            sent = packed, held = received
    coded     packed - sent -> code -> exchange of bytes -> decode -> held + difference = received
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.graph.aten import (
    ALL_TO_ALL,
    WAIT,
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
    encode,
    finite,
    lost_share,
    update,
)
from cocodiff_compile.graph.inline import Inliner
from cocodiff_compile.graph.layout import Size, known
from cocodiff_compile.graph.pipeline import PassResult
from cocodiff_compile.graph.records import Declined, Exchange, Recognition, Role, UlyssesSite


@dataclass(frozen=True)
class SelectVMajor:
    """`bits` per element of each role's exchange, FULL for all of them in full. An exchange that
    serves several roles takes the most any of them asks for.
    """

    bits: Mapping[Role, int]
    measures_drift: bool = False
    name: str = "select-v-major"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        rewritten: dict[Node, Exchange] = {}
        declined: list[Declined] = []
        losses: list[Node] = []
        inline = Inliner(graph)
        for site in found.sites:
            for exchange, bits, group in self._exchanges(site):
                for piece in exchange.pieces:
                    if reason := _why_not(piece, group):
                        declined.append(Declined(piece.start, reason, site.module_path))
                        continue
                    rewrite = _Rewrite(inline, piece, known(group) or 0)
                    if bits == FULL:
                        rewritten[piece.start] = rewrite.in_full()
                        continue
                    rewritten[piece.start], loss = rewrite.coded(bits, self.measures_drift)
                    losses += loss
        if self.measures_drift and rewritten:
            _emit_drift(graph, losses)
        for start in rewritten:
            erase_collective(graph, start)
        recognition = found.with_exchanges(rewritten)
        return PassResult(bool(rewritten), recognition, tuple(declined), self._notes(rewritten))

    def _exchanges(self, site: UlyssesSite) -> list[tuple[Exchange, int, Size]]:
        """Each exchange once, with its bits and the elements of a group."""
        chosen: dict[Node, tuple[Exchange, int, Size]] = {}
        for leg in site.legs:
            start = leg.exchange.start
            bits = self.bits[leg.role]
            if start in chosen:
                other = chosen[start][1]
                bits = FULL if FULL in (bits, other) else max(bits, other)
            chosen[start] = (leg.exchange, bits, leg.head_size)
        return list(chosen.values())

    def _notes(self, rewritten: Mapping[Node, Exchange]) -> tuple[str, ...]:
        how = ", ".join(
            f"{role.upper()} {'in full' if bits == FULL else f'in {bits} bits'}"
            for role, bits in self.bits.items()
        )
        return (f"{len(rewritten)} exchanges remembered: {how}",)


def _why_not(piece: Exchange, group: Size) -> str:
    shape = shape_of(bound(piece.start)["input"])
    if any(known(size) is None for size in shape) or known(group) is None:
        return f"what is exchanged has symbolic sizes {tuple(shape)}: compile with dynamic=False"
    if known(group) % GROUP_MULTIPLE:  # type: ignore[operator]
        return f"heads of {group} elements: {GROUP_MULTIPLE} do not divide them"
    return ""


def _send(packed: torch.Tensor, sent: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to send, and what is remembered as sent from now on."""
    coded = encode(packed.to(torch.float32) - sent.to(torch.float32), bits)
    return coded, update(sent, coded, bits)[0]


@dataclass(frozen=True)
class _Rewrite:
    inline: Inliner
    exchange: Exchange
    group: int
    """Elements that share a step."""

    @property
    def graph(self) -> Graph:
        return self.inline.graph

    def in_full(self) -> Exchange:
        """As it was; both sides remember what is finite of it."""
        sent, held = self._memories()
        flat = parse_all_to_all(self.exchange.start)
        assert flat is not None, "a recognised exchange has its wait"
        with self.graph.inserting_before(flat.start):
            source = emit_contiguous(self.graph, flat.source)
            self._remember(sent, self._call(finite, self._in_groups(source)))
            splits = bound(flat.start)["input_split_sizes"]
            start = self._emit(ALL_TO_ALL, source, splits, splits, flat.group)
        with self.graph.inserting_before(flat.wait):
            received = self._emit(WAIT, start)
            self._remember(held, self._call(finite, self._in_groups(received)))
        return self._replaced(flat.wait, start, received, received)

    def coded(self, bits: int, measures_loss: bool) -> tuple[Exchange, list[Node]]:
        """And, if that is asked for, the share of the energy sent that is lost."""
        sent, held = self._memories()
        flat = parse_all_to_all(self.exchange.start)
        assert flat is not None, "a recognised exchange has its wait"
        ones = [1] * self.exchange.num_ranks
        with self.graph.inserting_before(flat.start):
            packed = self._in_groups(emit_contiguous(self.graph, flat.source))
            bytes_, updated = self.inline(_send, packed, sent, bits, like=flat.source)
            loss = [self._call(lost_share, packed, updated)] if measures_loss else []
            self._remember(sent, updated)
            start = self._emit(ALL_TO_ALL, bytes_, ones, ones, flat.group)
        with self.graph.inserting_before(flat.wait):
            wait = self._emit(WAIT, start)
            updated, arrived = self.inline(update, held, wait, bits, like=flat.source)
            self._remember(held, updated)
            result = self._emit(aten.view.default, arrived, list(shape_of(flat.source)))
        return self._replaced(flat.wait, start, wait, result), loss

    def _emit(self, target: Callable[..., Any], *args: Any) -> Node:
        return emit(self.graph, target, *args, like=bound(self.exchange.start)["input"])

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        (result,) = self.inline(function, *args, like=bound(self.exchange.start)["input"])
        return result

    def _in_groups(self, packed: Node) -> Node:
        """[P, n, G]"""
        return self._emit(aten.view.default, packed, [self.exchange.num_ranks, -1, self.group])

    def _remember(self, memory: Node, value: Node) -> None:
        self._emit(aten.copy_.default, memory, value)

    def _memories(self) -> tuple[Node, Node]:
        """Two new graph inputs: what was sent last, and what was received."""
        packed, name = bound(self.exchange.start)["input"], self.exchange.start.name
        rows = value_of(packed).numel() // (self.exchange.num_ranks * self.group)
        shape = (self.exchange.num_ranks, rows, self.group)
        dtype = value_of(packed).dtype
        sent = _new_input(self.graph, f"sent_{name}", shape, dtype, packed)
        return sent, _new_input(self.graph, f"held_{name}", shape, dtype, packed)

    def _replaced(self, old_wait: Node, start: Node, wait: Node, result: Node) -> Exchange:
        old_wait.replace_all_uses_with(result)
        return replace(
            self.exchange,
            start=start,
            wait=wait,
            result=result if self.exchange.result is old_wait else self.exchange.result,
            size_bytes=size_bytes(start.all_input_nodes[0]),
        )


def _new_input(
    graph: Graph, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Node
) -> Node:
    """Behind all others."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(name)
    fake = value_of(like)
    with fake.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty(shape, dtype=dtype, device=fake.device)
    return node


def _emit_drift(graph: Graph, losses: Sequence[Node]) -> None:
    """Remembers the mean of all losses, 0 without any."""
    like = next(node for node in reversed(graph.nodes) if node.target is WAIT)
    drift = _new_input(graph, "drift", (), torch.float32, like)
    with graph.inserting_before(graph.output_node()):
        (mean,) = Inliner(graph)(_mean, drift, *losses, like=like)
        emit(graph, aten.copy_.default, drift, mean, like=like)


def _mean(drift: torch.Tensor, *losses: torch.Tensor) -> torch.Tensor:
    return torch.stack(losses).mean() if losses else torch.zeros_like(drift)
