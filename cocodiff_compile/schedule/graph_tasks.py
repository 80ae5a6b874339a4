# SPDX-License-Identifier: Apache-2.0
"""Turns a graph into tasks, and an order of tasks into an order of nodes.

Matmuls, attentions, collectives and waits have a place of their own; so does what has an effect
beside its value. All else is light: it goes right before the first of them that needs it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cost.ops import eager_seconds, heavy_seconds, light_seconds
from cocodiff_compile.cost.tasks import NO_SITE, Order, Task, places
from cocodiff_compile.cost.timeline import Work
from cocodiff_compile.ir.aten import (
    aten,
    bound,
    is_alias,
    is_heavy,
    parse_fused_attention,
    readers_of,
    size_bytes,
)
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.collectives import is_collective, is_wait
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.schedule.list_schedule import list_schedule


@dataclass(frozen=True)
class GraphTasks:
    """`nodes[i]` is what `tasks[i]` stands for."""

    tasks: tuple[Task, ...]
    nodes: tuple[Node, ...]


def is_anchor(node: Node) -> bool:
    """Returns whether a node has a place of its own in a schedule."""
    if node.op != "call_function" or is_write_back(node):
        return False
    return is_heavy(node) or is_collective(node) or node.is_impure()


def is_write_back(node: Node) -> bool:
    """Returns whether a node copies into an input of the graph, which nothing in it waits for."""
    return node.target is aten.copy_.default and bound(node)["self"].op == "placeholder"


def graph_tasks(graph: Graph, recognition: Recognition, costs: Costs) -> GraphTasks:
    """Returns the tasks of a graph, in its order."""
    anchors = [node for node in graph.nodes if is_anchor(node)]
    needs = _needs(graph, anchors)
    sites = _sites(recognition)
    tasks = []
    for anchor, cone, needed in zip(anchors, _cones(graph, anchors), needs, strict=True):
        task = _task(anchor, needed, sites, costs)
        light_s = sum(light_seconds(node, costs.device) for node in cone.nodes)
        tasks.append(replace(task, light_s=light_s, borrows=cone.borrows))
    return GraphTasks(tuple(tasks), tuple(anchors))


def unneeded_seconds(graph: Graph, costs: Costs) -> float:
    """Returns the time of the light kernels that no task needs: those that make results of the
    graph. No order changes it, so that estimates leave it out.
    """
    anchors = [node for node in graph.nodes if is_anchor(node)]
    needed = {node for cone in _cones(graph, anchors) for node in cone.nodes} | set(anchors)
    rest = (node for node in graph.nodes if node.op == "call_function" and node not in needed)
    return sum(light_seconds(node, costs.device) for node in rest)


def eager_tasks(graph: Graph, costs: Costs) -> tuple[Task, ...]:
    """Returns a task for every call of a graph that runs call by call, in its order."""
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_alias(node)]
    tasks = []
    for node, needs in zip(calls, _needs(graph, calls), strict=True):
        task = _task(node, needs, {}, costs)
        if not is_wait(node) and not is_collective(node):
            task = replace(task, seconds=eager_seconds(node, costs.device))
        tasks.append(task)
    return tuple(tasks)


def step_seconds(graph: Graph, recognition: Recognition, costs: Costs) -> float:
    """Returns the estimated time of a graph in the best order that is found for it."""
    return list_schedule(graph_tasks(graph, recognition, costs).tasks).clock.now_s


def _task(node: Node, needs: tuple[int, ...], sites: Mapping[Node, int], costs: Costs) -> Task:
    make = functools.partial(Task, node.name, needs=needs, site=sites.get(node, NO_SITE))
    if is_wait(node):
        # Waiting again for what was waited for is none.
        return make(kind="wait" if is_collective(_started(node)) else "compute")
    if not is_collective(node):
        heavy_s = heavy_seconds(node, costs.device) if is_heavy(node) else 0.0
        return make(kind="compute", seconds=heavy_s, work=_work(node, sites))
    cost = costs.exchange(node)
    return make(
        kind="start",
        seconds=max(costs.device.start_s, costs.device.launch_s),
        exchange_s=cost.seconds,
        busy_s=cost.busy_s,
        links=cost.links,
        size_bytes=optimization_hint(size_bytes(node.all_input_nodes[0])),
        group=str(bound(node)["group_name"]),
    )


def _work(node: Node, sites: Mapping[Node, int]) -> Work:
    if is_attention(node.target) or node in sites:
        return "attention"
    return "matmul" if is_heavy(node) else "kernel"


def _started(wait: Node) -> Node:
    """Returns what a wait waits for: a collective, or one result of a collective with several."""
    node = wait.all_input_nodes[0]
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _sites(recognition: Recognition) -> dict[Node, int]:
    """Returns the attention of each node that belongs to one: exchanges and computation."""
    sites: dict[Node, int] = {}
    for number, site in enumerate(recognition.sites):
        own = [*site.attention.nodes]
        for exchange in site.pieces:
            own += [exchange.start, exchange.wait]
            own += [node for phase in exchange.phases for node in (phase.start, phase.wait)]
        sites.update(dict.fromkeys(own, number))
    return sites


def _needs(graph: Graph, anchors: Sequence[Node]) -> list[tuple[int, ...]]:
    """Returns for each anchor the nearest ones that it needs, without those that these need."""
    number = {node: place for place, node in enumerate(anchors)}
    nearest: dict[Node, int] = {}
    before: list[int] = []
    found: list[tuple[int, ...]] = []
    last_effect = 0
    for node in graph.nodes:
        bits = 0
        for source in node.all_input_nodes:
            bits |= nearest[source]
        if node not in number:
            nearest[node] = _reduced(bits, before)
            continue
        if has_other_effect(node):
            bits, last_effect = bits | last_effect, 1 << number[node]
        bits = _reduced(bits, before)
        found.append(tuple(places(bits)))
        before.append(functools.reduce(int.__or__, (before[p] for p in places(bits)), bits))
        nearest[node] = 1 << number[node]
    return found


def has_other_effect(node: Node) -> bool:
    """Returns whether a node must keep its order: it draws numbers or copies into an input."""
    if is_attention(node.target):
        attention = parse_fused_attention(node)
        if attention.op.dropout is not None:
            return attention.has_dropout  # without, it draws no random numbers
    return node.is_impure() and not is_wait(node) and not is_collective(node)


def _reduced(bits: int, before: Sequence[int]) -> int:
    """Returns those that stand before no other of them."""
    if not bits & (bits - 1):
        return bits
    covered = 0
    for place in places(bits):
        covered |= before[place]
    return bits & ~covered


@dataclass(frozen=True)
class _Cone:
    """The light nodes an anchor needs that none before it did, in graph order; and the places of
    those before it that have others it needs.
    """

    nodes: list[Node]
    borrows: tuple[int, ...]


def _cones(graph: Graph, anchors: Sequence[Node]) -> list[_Cone]:
    """Returns the cone of each anchor, in the order given; `anchors` are all that a graph has."""
    position = {node: place for place, node in enumerate(graph.nodes)}
    all_anchors = frozenset(anchors)
    owner: dict[Node, int] = {}
    cones = []
    for place, anchor in enumerate(anchors):
        nodes: list[Node] = []
        borrows: dict[int, None] = {}
        stack = [anchor]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source.op != "call_function" or source in all_anchors:
                    continue
                if source not in owner:
                    owner[source] = place
                    nodes.append(source)
                    stack.append(source)
                elif is_alias(source):
                    stack.append(source)  # costs nothing itself, what is behind it may
                elif owner[source] != place:
                    borrows[owner[source]] = None
        cones.append(_Cone(sorted(nodes, key=position.__getitem__), tuple(borrows)))
    return cones


def node_order(graph: Graph, anchors: Sequence[Node], order: Order) -> list[Node]:
    """Returns all nodes of a graph with its anchors in `order`: what is light right before what
    needs it, and copies into inputs where they can first be made.
    """
    ordered = [anchors[place] for place in order]
    wanted: list[Node] = []
    for anchor, cone in zip(ordered, _cones(graph, ordered), strict=True):
        wanted += [*cone.nodes, anchor]
    moved = set(wanted)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    rest = [node for node in calls if node not in moved]
    others = [node for node in graph.nodes if node.op not in ("call_function", "output")]
    return [*others, *_as_early_as_possible(wanted, rest), graph.output_node()]


def reorder(graph: Graph, nodes: Sequence[Node]) -> None:
    """Puts the nodes of a graph into another order."""
    output = graph.output_node()
    for node in nodes:
        if node.op == "call_function":
            output.prepend(node)


def _as_early_as_possible(wanted: Sequence[Node], rest: Sequence[Node]) -> list[Node]:
    """Returns `wanted` as it is, and each node of `rest` right behind the last one it needs. A copy
    into an input needs all that read this input, so that it does not overwrite what they read.
    """
    waits: dict[Node, int] = {}
    followers: dict[Node, list[Node]] = {}
    for node in rest:
        before = dict.fromkeys(node.all_input_nodes)
        if is_write_back(node):
            before.update(dict.fromkeys(readers_of(bound(node)["self"])))
        needed = [other for other in before if other.op == "call_function" and other is not node]
        waits[node] = len(needed)
        for other in needed:
            followers.setdefault(other, []).append(node)
    found: list[Node] = []
    for begin in (*(node for node in rest if not waits[node]), *wanted):
        ready = [begin]
        while ready:
            found.append(ready.pop())
            for node in reversed(followers.get(found[-1], ())):
                waits[node] -= 1
                if not waits[node]:
                    ready.append(node)
    placed = set(found)
    return found + [node for node in rest if node not in placed]
