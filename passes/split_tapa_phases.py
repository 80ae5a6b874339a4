# SPDX-License-Identifier: Apache-2.0
"""split-tapa-phases: run an exchange in phases along the axes of the machine.

Needs     for every Ulysses group a machine that it fills, with this rank's group for every set of
          axes that a plan may use; the phases of every exchange.
Rewrites  each all-to-all of a site whose plan has more than one phase. The first phase starts
          where the exchange started and the last is waited for where the exchange was; what is in
          between stands before the first wait after the start, so that exchanges in flight
          together stay so.
Keeps     every value, bit for bit: data only moves. Each phase has its own start and wait. One copy
          more per extra phase: the first pack and the last unpack join the model's own.
Declines  nothing: an exchange whose plan is flat stays as it is.

One exchange over n * g * t ranks in the phases  tile | gpu+node.  Dims are destinations (d) until a
phase turns them into sources (s); m is what one rank sends to one other:

    [n_d, g_d, t_d, m]  permute  [t_d, n_d, g_d, m]  all-to-all over t    [t_s, n_d, g_d, m]
                        permute  [n_d, g_d, t_s, m]  all-to-all over n, g [n_s, g_s, t_s, m]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    WAIT,
    aten,
    bound,
    emit,
    emit_contiguous,
    emit_shape,
)
from cocodiff_compile.ir.collectives import erase_collective, parse_all_to_all, waits_behind
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Exchange, ExchangePhase, Recognition
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import Phases, format_phases

Shape: TypeAlias = "list[int | Node]"


@dataclass(frozen=True)
class SplitTapaPhases:
    """`machines` holds the machine under each Ulysses group, by the group's name; `phases` those of
    an exchange, by its group and its bytes per rank.
    """

    machines: Mapping[str, Machine]
    phases: Mapping[tuple[str, int], Phases]
    name: str = "split-tapa-phases"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:
        pieces = flat_pieces(recognition)
        for item in pieces:
            if exchange_key(item) not in self.phases:
                raise UserError(
                    f"no phases are given for exchanges of {item.size_bytes} bytes: option "
                    "'decision' was made for another graph; save the decisions again"
                )
        plans = [self.phases[exchange_key(item)] for item in pieces]
        phased = [
            (item, self.machines[item.group], _in_order(item, phases))
            for item, phases in zip(pieces, plans, strict=True)
            if len(phases) > 1
        ]
        rewritten = split_exchanges(graph, phased)
        counts = Counter(map(format_phases, plans))
        notes = tuple(f"{number} exchanges: {plan}" for plan, number in counts.items())
        return PassResult(bool(phased), recognition.with_exchanges(rewritten), notes=notes)


def flat_pieces(recognition: Recognition) -> list[Exchange]:
    """The exchanges that run in one phase so far, chunk by chunk."""
    return [item for site in recognition.sites for item in site.pieces if not item.phases]


def exchange_key(exchange: Exchange) -> tuple[str, int]:
    """The group and the bytes of an exchange, by which its phases are chosen."""
    return exchange.group, optimization_hint(exchange.size_bytes)


def _in_order(exchange: Exchange, phases: Phases) -> Phases:
    """Returns the phases in the order in which this exchange runs them.

    The output exchange mirrors the input exchanges: those pack before their first phase anyway, it
    unpacks after its last, and the other end may be free of copies.
    """
    return phases if exchange.direction == "in" else phases[::-1]


def split_exchanges(
    graph: Graph, phased: Sequence[tuple[Exchange, Machine, Phases]]
) -> dict[Node, Exchange]:
    """Replaces exchanges by their phases; the new ones, by the start of the old."""
    middles = _first_waits(graph, [item.start for item, _, _ in phased])
    begun = [
        _begin(graph, item, machine, phases, middles[item.start])
        for item, machine, phases in phased
    ]
    rewritten = {item.exchange.start: _finish(graph, item) for item in begun}
    for start in rewritten:
        erase_collective(graph, start)
    return rewritten


def _first_waits(graph: Graph, starts: Sequence[Node]) -> dict[Node, Node]:
    """Returns for each start the first wait, of any of them, behind it."""
    ends = {_wait_of(start) for start in starts}
    found: dict[Node, Node] = {}
    wait: Node | None = None
    for node in reversed(graph.nodes):
        if node in ends:
            wait = node
        elif wait is not None:
            found[node] = wait
    return found


def _wait_of(start: Node) -> Node:
    return next(user for user in start.users if user.target is WAIT)


@dataclass(frozen=True)
class _Begun:
    """An exchange whose last phase has started."""

    exchange: Exchange
    machine: Machine
    shape: Shape
    blocks: _Blocks
    started: tuple[tuple[tuple[str, ...], Node], ...]


def _begin(
    graph: Graph, exchange: Exchange, machine: Machine, phases: Phases, middle: Node
) -> _Begun:
    flat = parse_all_to_all(exchange.start)
    assert flat is not None, "a recognised exchange has its wait"
    with graph.inserting_before(flat.start):
        shape = emit_shape(graph, flat.source)
        message = [bound(flat.start)["input_split_sizes"][0], *shape[1:]]
        blocks = _Blocks.of(graph, flat.source, machine, message)
    started: list[tuple[tuple[str, ...], Node]] = []
    for axes in phases:
        with graph.inserting_before(middle if started else flat.start):
            if started:
                blocks = blocks.received()
            blocks = blocks.to_front(axes).sent(len(axes), machine.groups[axes])
            started.append((axes, blocks.value))
    return _Begun(exchange, machine, shape, blocks, tuple(started))


def _finish(graph: Graph, begun: _Begun) -> Exchange:
    """Waits for the last phase and puts its result in place of the exchange's."""
    exchange, machine = begun.exchange, begun.machine
    with graph.inserting_before(_wait_of(exchange.start)):
        value = begun.blocks.received().turned(machine.message_order).value
        value = emit(graph, aten.view.default, value, begun.shape, like=value)
    for wait in waits_behind(exchange.start):
        wait.replace_all_uses_with(value, delete_user_cb=lambda user: user.target is not WAIT)
    phases = tuple(
        ExchangePhase(axes, start, _wait_of(start), machine.groups[axes])
        for axes, start in begun.started
    )
    return replace(
        exchange,
        start=phases[0].start,
        wait=phases[-1].wait,
        result=value if exchange.result is exchange.wait else exchange.result,
        phases=phases,
    )


@dataclass(frozen=True)
class _Blocks:
    """The messages of one rank: `value` is [one dim per axis in `order`, *message]."""

    graph: Graph
    value: Node
    order: tuple[str, ...]
    sizes: Mapping[str, int]
    message: Shape

    @classmethod
    def of(cls, graph: Graph, source: Node, machine: Machine, message: Shape) -> _Blocks:
        """Messages as the flat exchange takes them: to all ranks, in the order of ranks."""
        sizes = {name: machine.topology.axis(name).size for name in machine.message_order}
        source = emit_contiguous(graph, source)
        return cls(graph, source, machine.message_order, sizes, message).viewed()

    def viewed(self) -> _Blocks:
        shape = [*(self.sizes[name] for name in self.order), *self.message]
        return replace(
            self, value=emit(self.graph, aten.view.default, self.value, shape, like=self.value)
        )

    def to_front(self, axes: tuple[str, ...]) -> _Blocks:
        """`axes` first, outermost first: as their group counts its ranks."""
        front = tuple(name for name in self.sizes if name in axes)
        return self.turned((*front, *(name for name in self.order if name not in axes)))

    def turned(self, order: tuple[str, ...]) -> _Blocks:
        """The axes in another order, in memory too."""
        if order == self.order:
            return self
        dims = [self.order.index(name) for name in order]
        dims += range(len(dims), len(dims) + len(self.message))
        turned = emit(self.graph, aten.permute.default, self.value, dims, like=self.value)
        return replace(self, value=emit_contiguous(self.graph, turned), order=order)

    def sent(self, num_axes: int, group: str) -> _Blocks:
        """The all-to-all along the first `num_axes`, started."""
        lengths = [self.sizes[name] for name in self.order]
        ranks = math.prod(lengths[:num_axes])
        shape = [ranks, *lengths[num_axes:], *self.message]
        packed = emit(self.graph, aten.view.default, self.value, shape, like=self.value)
        splits = [1] * ranks
        start = emit(self.graph, ALL_TO_ALL, packed, splits, splits, group, like=packed)
        return replace(self, value=start)

    def received(self) -> _Blocks:
        """Returns what was sent, waited for."""
        wait = emit(self.graph, WAIT, self.value, like=self.value)
        return replace(self, value=wait).viewed()
