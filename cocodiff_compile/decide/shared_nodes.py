# SPDX-License-Identifier: Apache-2.0
"""Chooses which nodes ranks share out, by a minimum cut between what is shared and what is whole.

A node costs its time as a whole, or a share of it and, for a Ulysses attention, its exchanges. A
node that is shared but read as a whole costs a gather, once for all readers; one that is whole but
read as a share costs the copy of that share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import networkx
import torch
from torch.fx import Graph, Node

from cocodiff_compile.cost.ops import heavy_seconds, hinted_bytes, light_seconds
from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.aten import (
    SLICING,
    is_alias,
    is_heavy,
    is_tensor,
    parse_fused_attention,
    value_of,
)
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.collectives import is_collective
from cocodiff_compile.schedule.graph_tasks import is_write_back
from cocodiff_compile.shard.any_size import depends_on_values
from cocodiff_compile.shard.gathers import (
    kept_results,
    looked_into,
    shown_together,
    why_not_gathered,
)
from cocodiff_compile.shard.shares import AttentionMode, Shared, shared
from cocodiff_compile.shard.spread import is_of_group, spread
from cocodiff_compile.shard.whole_of_shares import WHOLE

_SHARED, _WHOLE = "shared", "whole"
_UNIT_S = 1e-15
"""Times are whole numbers of this unit: rests of rounding would look like room for more flow, and
the sides of the cut would not be those of its value.
"""


@dataclass(frozen=True)
class ShareCosts:
    """States what computing, exchanging and gathering cost."""

    device: Device
    exchange_seconds: Callable[[int], float]
    """The time of an exchange, by the bytes that each rank hands over, its own part included."""

    def node_seconds(self, node: Node) -> float:
        if node.target is WHOLE:
            return self.exchange_seconds(hinted_bytes(node))
        if is_heavy(node):
            return heavy_seconds(node, self.device)
        return light_seconds(node, self.device)


@dataclass(frozen=True)
class Sharing:
    """Holds which nodes are shared out, and what that saves."""

    steps: Mapping[Node, Shared]
    whole_s: float
    shared_s: float
    refused: Mapping[Node, str]
    """The nodes that tokens were followed to but that cannot be shared out, with the reason."""
    could: Mapping[Node, Shared] = field(default_factory=dict)
    """All nodes that can be shared out."""

    @property
    def gain(self) -> float:
        """Returns by how much a step is estimated to get faster."""
        return self.whole_s / self.shared_s if self.shared_s else 1.0


def why_not_shared(graph: Graph) -> str:
    """Returns why nothing of a graph can be shared out; an empty string if something may be."""
    if any(map(is_collective, graph.nodes)):
        return "the model exchanges tokens itself"
    if not graph.find_nodes(op="placeholder"):
        return "it has no inputs"
    if any(map(is_write_back, graph.nodes)):
        return "the model writes to its inputs"
    if depends_on_values(graph):
        return "sizes depend on values"
    if not any(is_attention(node.target) for node in graph.nodes):
        return "no attention in it"
    if len(devices := _attention_devices(graph)) > 1:
        return f"its attentions are on {len(devices)} devices"
    for node in filter(_draws, graph.nodes):
        return f"{node.target} draws random numbers, which differ between ranks"
    return ""


def _attention_devices(graph: Graph) -> set[torch.device]:
    attentions = (node for node in graph.nodes if is_attention(node.target))
    return {value_of(parse_fused_attention(node).query).device for node in attentions}


def _draws(node: Node) -> bool:
    """Returns whether somebody reads random numbers that a node draws."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.users:
        return False
    if is_attention(node.target):
        return parse_fused_attention(node).has_dropout
    return torch.Tag.nondeterministic_seeded in node.target.tags


def choose_sharing(
    graph: Graph, group: str, num_ranks: int, costs: ShareCosts, keeps_shares: bool = False
) -> Sharing:
    """Returns what is shared out over the ranks of a group, nothing where that gains nothing. With
    `keeps_shares`, outputs that are shared out need not be gathered.
    """
    proposed = spread(graph, group, num_ranks)
    foreign = {
        node: f"{node.name} holds the shares of another group of ranks"
        for node in graph.find_nodes(op="call_function", target=WHOLE)
        if not is_of_group(node, group, num_ranks)
    }
    together = {
        node: f"{node.name} shows memory of another result"
        for node in shown_together(graph)
        if is_alias(node)
    }
    candidates, refused = _candidates(graph, proposed, {**foreign, **together})
    whole_s = sum(map(costs.node_seconds, _calls(graph)))
    if not candidates:
        return Sharing({}, whole_s, whole_s, refused)
    network = _Network(graph, candidates, num_ranks, costs, keeps_shares)
    shared_s, side = network.shared_nodes()
    fixed = sum(costs.node_seconds(node) for node in _calls(graph) if node not in candidates)
    steps = {node: step for node, step in candidates.items() if node in side}
    return Sharing(steps, whole_s, shared_s + fixed, refused, candidates)


def _calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _candidates(
    graph: Graph, proposed: Mapping[Node, Cut], never: Mapping[Node, str]
) -> tuple[dict[Node, Shared], dict[Node, str]]:
    """Returns the nodes that can be shared out, and why others cannot; `never` is known before."""
    found: dict[Node, Shared] = {}
    refused, devices = {**never}, _attention_devices(graph)
    for node in _calls(graph):
        if node not in proposed or node in never:
            continue
        try:
            step = shared(node, proposed[node], proposed)
        except CutUnknown as error:
            refused[node] = str(error)
            continue
        where = {value_of(item).device for item in (node, *step.needs) if is_tensor(item)}
        if where <= devices:
            found[node] = step
        else:
            refused[node] = f"{node.name} is not where the attentions are, or is moved there"
    # Results of several stand and fall together with what makes them.
    for node in list(found):
        source = node.all_input_nodes[0] if node.target is operator.getitem else None
        if source is not None and source.target not in SLICING and source not in found:
            del found[node]
    for node in list(found):
        if not is_tensor(node) and any(user not in found for user in node.users):
            refused[node] = f"{node.name} has results that are not shared out"
            for item in (node, *node.users):
                found.pop(item, None)
    return found, refused


class _Network:
    """The network whose minimum cut parts what is shared from what is whole."""

    def __init__(
        self,
        graph: Graph,
        candidates: Mapping[Node, Shared],
        num_ranks: int,
        costs: ShareCosts,
        keeps_shares: bool,
    ) -> None:
        self.candidates, self.num_ranks, self.costs = candidates, num_ranks, costs
        self.looked_into = looked_into(graph)
        kept = kept_results(graph) if keeps_shares else ()
        self.edges: networkx.DiGraph[object] = networkx.DiGraph()
        self.edges.add_nodes_from((_SHARED, _WHOLE))
        for node, step in candidates.items():
            self._add_node(node, step)
        for node in graph.nodes:
            is_split = node.target in SLICING and not is_tensor(node)  # its results read for it
            if not is_split:
                for source in node.all_input_nodes:
                    if not (node.op == "output" and source in kept):
                        self._add_reader(node, behind_split(node, source))

    def shared_nodes(self) -> tuple[float, set[object]]:
        """Returns the least time, and what is shared for that."""
        units, (side, _) = networkx.minimum_cut(
            self.edges, _SHARED, _WHOLE, flow_func=networkx.algorithms.flow.boykov_kolmogorov
        )
        return units * _UNIT_S, set(side)

    def _add_node(self, node: Node, step: Shared) -> None:
        seconds = self.costs.node_seconds(node)
        exchanges_s = attention_exchange_seconds(step, self.num_ranks, self.costs)
        self._add(_SHARED, node, seconds)
        share_s = 0.0 if node.target is WHOLE else seconds / self.num_ranks
        self._add(node, _WHOLE, share_s + exchanges_s)
        if not is_tensor(node):
            for user in node.users:  # several results stay with what makes them
                self._add(node, user, math.inf)
                self._add(user, node, math.inf)

    def _add_reader(self, node: Node, source: Node) -> None:
        if not is_tensor(source):
            return
        step, read = self.candidates.get(node), self.candidates.get(source)
        need = step.needs.get(source) if step is not None else None
        if read is not None:
            gather = ("gather", source)
            if gather not in self.edges:
                self._add(source, gather, self._gather_seconds(source))
            is_alike = need is not None and read.cut.is_like(need)
            self._add(gather, node if is_alike else _WHOLE, math.inf)
        if need is not None:
            copied = 2 * hinted_bytes(source) / self.num_ranks
            copy_s = self.costs.device.memory_seconds(copied)
            self._add(node, source if read is not None else _WHOLE, copy_s)

    def _gather_seconds(self, source: Node) -> float:
        if why_not_gathered(source, self.looked_into):
            return math.inf
        return self.costs.exchange_seconds(hinted_bytes(source))

    def _add(self, start: object, end: object, seconds: float) -> None:
        known = self.edges.get_edge_data(start, end, {"capacity": 0})["capacity"]
        units = seconds if math.isinf(seconds) else round(seconds / _UNIT_S)
        self.edges.add_edge(start, end, capacity=known + units)


def behind_split(node: Node, source: Node) -> Node:
    """Returns what a node reads, behind a split whose result it is."""
    is_part = node.target is operator.getitem and source.target in SLICING
    return source.all_input_nodes[0] if is_part else source


def attention_exchange_seconds(step: Shared, num_ranks: int, costs: ShareCosts) -> float:
    """Returns the time of the exchanges of an attention, 0 where it has none."""
    if step.mode is not AttentionMode.ULYSSES:
        return 0.0
    sizes = [hinted_bytes(source) // num_ranks for source in step.needs]
    sizes.append(sizes[-1])  # the output is as large as the query
    return sum(map(costs.exchange_seconds, sizes))
