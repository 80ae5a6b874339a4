# SPDX-License-Identifier: Apache-2.0
"""Finds the all-to-alls of a graph, and those around one attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import ALL_TO_ALL, SLICING, WAIT, is_view
from cocodiff_compile.ir.collectives import AllToAll, parse_all_to_all
from cocodiff_compile.ir.parts import rejoined
from cocodiff_compile.ir.records import Role
from cocodiff_compile.recognize.attention_cores import AttentionCore
from cocodiff_compile.recognize.walk import Reached, are_inputs, walk_back, walk_forward


@dataclass(frozen=True)
class Exchanges:
    """Holds the all-to-alls of a graph, by their first and by their last node."""

    by_start: Mapping[Node, AllToAll]
    by_wait: Mapping[Node, AllToAll]

    @classmethod
    def of(cls, graph: Graph) -> Exchanges:
        starts = graph.find_nodes(op="call_function", target=ALL_TO_ALL)
        parsed = [item for start in starts if (item := parse_all_to_all(start)) is not None]
        return cls({item.start: item for item in parsed}, {item.wait: item for item in parsed})


@dataclass(frozen=True)
class Surroundings:
    """Holds the exchanges that an attention reads from, per role, and those it writes to."""

    input_routes: Mapping[Role, list[Reached]]
    output_routes: list[Reached]
    collectives: Mapping[Role, Node]
    """Another collective that stands between the attention and the exchange of a role."""
    behind: tuple[AllToAll, ...]
    """The exchanges on the other side of those collectives."""
    from_outside: frozenset[Role]
    """The roles that are inputs of the graph, computed in it by light ops at most."""
    leaves_graph: bool
    """Whether the result is an output of the graph."""

    @classmethod
    def of(cls, core: AttentionCore, exchanges: Exchanges) -> Surroundings:
        input_routes: dict[Role, list[Reached]] = {}
        collectives: dict[Role, Node] = {}
        behind: list[AllToAll] = []
        from_outside: set[Role] = set()
        for role, operand in core.operands.items():
            reached = walk_back(operand.node)
            if are_inputs(reached):
                from_outside.add(role)
            input_routes[role] = [route for route in reached if route.barrier in exchanges.by_wait]
            for collective in _other_collectives(reached, exchanges):
                routes = walk_back(collective.all_input_nodes[0])
                waits = [route.barrier for route in routes if route.barrier in exchanges.by_wait]
                if waits:
                    collectives.setdefault(role, collective)
                    behind += [exchanges.by_wait[wait] for wait in waits]
        ahead = walk_forward(core.output)
        return cls(
            input_routes,
            [route for route in ahead if route.barrier in exchanges.by_start],
            collectives,
            tuple(behind),
            frozenset(from_outside),
            any(route.barrier.op == "output" for route in ahead),
        )

    def all_to_alls(self, exchanges: Exchanges) -> list[AllToAll]:
        """Returns every exchange that touches this attention once, those of its operands first."""
        touching = [
            exchanges.by_wait[route.barrier]
            for routes in self.input_routes.values()
            for route in routes
        ]
        touching += [exchanges.by_start[route.barrier] for route in self.output_routes]
        touching += self.behind
        return list({item.start: item for item in touching}.values())


def _other_collectives(reached: list[Reached], exchanges: Exchanges) -> list[Node]:
    waits = (route.barrier for route in reached if route.barrier.target is WAIT)
    return [wait.all_input_nodes[0] for wait in waits if wait not in exchanges.by_wait]


def before_views(node: Node) -> Node:
    """Returns the tensor of which `node` is a chain of views and copies."""
    while is_view(node) or rejoined(node) is not None:
        joined = rejoined(node)
        node = node.all_input_nodes[0] if joined is None else joined[0]
    return node


def view_path(source: Node, end: Node) -> tuple[Node, ...]:
    """Returns the path from `source = before_views(end)` to `end`."""
    path = [end]
    while path[-1] is not source:
        path.append(path[-1].all_input_nodes[0])
    return tuple(reversed(path))


def views_after(wait: Node) -> tuple[Node, ...]:
    """Returns the chain of views that a result runs through, the first view of several."""
    path = [wait]
    while ahead := _next_view(path[-1]):
        path += ahead
    return tuple(path)


def _next_view(node: Node) -> tuple[Node, ...]:
    """Returns the path to the next view of all of `node`: a reader, or all its parts joined."""
    for reader in node.users:
        if is_view(reader):
            return (reader,)
        parts = list(reader.users) if reader.target in SLICING else []
        for part in parts:
            for path in ((reader, part), *((reader, part, joining) for joining in part.users)):
                joined = rejoined(path[-1])
                if joined is not None and joined[0] is node:
                    return path
    return ()
