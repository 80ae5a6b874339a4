# SPDX-License-Identifier: Apache-2.0
"""Builds a graph of a single all-to-all, its phases, and values that name their origin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from cocodiff_compile.ir.aten import ALL_TO_ALL, WAIT
from cocodiff_compile.ir.records import Exchange
from cocodiff_compile.passes.split_tapa_phases import split_exchanges
from cocodiff_compile.recognize.exchanges import Exchanges
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import Phases

FLAT = "all"
"""The name of the group over all ranks. The group need not exist as long as nothing runs."""
MESSAGE = (2, 3)
"""The shape of the message from one rank to another."""


def exchange_graph(num_ranks: int, message: Sequence[int] = MESSAGE, group: str = FLAT) -> Graph:
    """Returns a graph that exchanges its input, the messages to all ranks along the first dim."""
    rows, *others = message
    splits = [rows] * num_ranks

    def exchange(x: Tensor) -> Tensor:
        result: Tensor = WAIT(ALL_TO_ALL(x, splits, splits, group))
        return result

    graph: Graph = make_fx(exchange, tracing_mode="fake")(
        torch.zeros(rows * num_ranks, *others)
    ).graph
    return graph


def exchanges_of(graph: Graph) -> list[Exchange]:
    """Returns every all-to-all of a graph, as if recognised."""
    return [
        Exchange(item.start, item.wait, item.source, item.wait, "in", item.group, (), (), 0, 0, 0)
        for item in Exchanges.of(graph).by_start.values()
    ]


def split_only_exchange(graph: Graph, machine: Machine, phases: Phases) -> Exchange:
    """Rewrites the only exchange of a graph into phases; returns the new exchange."""
    (exchange,) = exchanges_of(graph)
    (done,) = split_exchanges(graph, [(exchange, machine, phases)]).values()
    graph.lint()
    return done


def origins(num_ranks: int) -> list[list[Tensor]]:
    """Returns the graph's input on every rank, with values that name their rank and position."""
    rows, columns = MESSAGE
    values = torch.arange(float(num_ranks * rows * columns)).reshape(-1, columns)
    return [[values + values.numel() * rank] for rank in range(num_ranks)]
