"""The all-to-alls of a graph, and those around one attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from cocodiff_compile.graph.aten import ALL_TO_ALL, AllToAll, is_view, parse_all_to_all, rejoined
from cocodiff_compile.graph.attention_cores import AttentionCore, Operand
from cocodiff_compile.graph.records import Role
from cocodiff_compile.graph.walk import Reached, walk_back, walk_forward


@dataclass(frozen=True)
class Exchanges:
    """The all-to-alls of a graph, found by their first and by their last node."""

    by_start: Mapping[Node, AllToAll]
    by_wait: Mapping[Node, AllToAll]

    @classmethod
    def of(cls, graph: Graph) -> Exchanges:
        starts = graph.find_nodes(op="call_function", target=ALL_TO_ALL)
        parsed = [found for start in starts if (found := parse_all_to_all(start)) is not None]
        return cls({item.start: item for item in parsed}, {item.wait: item for item in parsed})


@dataclass(frozen=True)
class Surroundings:
    """Which exchanges an attention is fed by, per role, and which its result goes into."""

    ways_in: Mapping[Role, list[Reached]]
    ways_out: list[Reached]

    @classmethod
    def of(cls, core: AttentionCore, exchanges: Exchanges) -> Surroundings:
        operands: dict[Role, Operand] = {"q": core.q, "k": core.k, "v": core.v}
        ways_in = {
            role: [way for way in walk_back(operand.node) if way.barrier in exchanges.by_wait]
            for role, operand in operands.items()
        }
        ways_out = [way for way in walk_forward(core.output) if way.barrier in exchanges.by_start]
        return cls(ways_in, ways_out)

    def all_to_alls(self, exchanges: Exchanges) -> list[AllToAll]:
        """Every exchange that touches this attention, once, ways in first."""
        found = [exchanges.by_wait[way.barrier] for ways in self.ways_in.values() for way in ways]
        found += [exchanges.by_start[way.barrier] for way in self.ways_out]
        return list({item.start: item for item in found}.values())


def before_views(node: Node) -> Node:
    """The tensor that a chain of views and copies ending in `node` shows."""
    while is_view(node) or rejoined(node) is not None:
        found = rejoined(node)
        node = node.all_input_nodes[0] if found is None else found[0]
    return node


def view_path(source: Node, end: Node) -> tuple[Node, ...]:
    """From `source = before_views(end)` to `end`."""
    path = [end]
    while path[-1] is not source:
        path.append(path[-1].all_input_nodes[0])
    return tuple(reversed(path))
