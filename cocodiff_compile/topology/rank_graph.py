# SPDX-License-Identifier: Apache-2.0
"""Describes the machine as a networkx graph of ranks, NICs and switches, and folds it into axes.

    rank 0 ─┐                    ┌─ rank 2
            ├ switch pcie 0      ├ switch pcie 1         edges carry their `Link`
    rank 1 ─┘                    └─ rank 3
    ranks 0, 1 ── nic ── switch ethernet 0 ── nic ── ranks 2, 3

A box is a set of ranks that one link class joins, here {0, 1} and {2, 3} by pcie and all four by
ethernet. Boxes of one class have one size and hold consecutive ranks; the boxes of the next class
hold whole boxes of the last. Each class is then an axis. Classes are ordered by the size of their
boxes, not by speed: on Aurora a rank gets more from its NICs than from one Xe Link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Axis, Link, Topology


@dataclass(frozen=True)
class Box:
    """A box is a set of ranks that links of one class join; `axis` names its level."""

    axis: str
    link: Link
    ranks: tuple[int, ...]


def rank_graph(topology: Topology) -> nx.Graph[object]:
    """Returns a graph whose nodes have a `kind` ("rank", "nic", "switch") and whose edges have a
    `link`. It has NICs where ranks share one.
    """
    return graph_of_boxes(
        topology.name, topology.copy_bytes_per_s, range(topology.num_ranks), boxes_of(topology)
    )


def boxes_of(topology: Topology) -> Iterator[Box]:
    """Yields the boxes of every axis, inner axes first, in rank order."""
    size = 1
    for axis in topology.axes:
        size *= axis.size
        for first in range(0, topology.num_ranks, size):
            yield Box(axis.name, axis.link, tuple(range(first, first + size)))


def graph_of_boxes(
    name: str, copy_bytes_per_s: float, ranks: Iterable[int], boxes: Iterable[Box]
) -> nx.Graph[object]:
    """Returns a graph with a switch per box, and a NIC per `ranks_per_link` of the ranks that enter
    the box from the same smaller box.
    """
    graph: nx.Graph[object] = nx.Graph(name=name, copy_bytes_per_s=copy_bytes_per_s)
    graph.add_nodes_from(ranks, kind="rank")
    entered: dict[int, list[tuple[int, Box]]] = {}
    for number, box in enumerate(boxes):
        switch = ("switch", number)
        graph.add_node(switch, kind="switch", axis=box.axis)
        for index, part in enumerate(_parts(box, entered)):
            _join(graph, switch, index, part, box.link)
        for rank in box.ranks:
            entered.setdefault(rank, []).append((number, box))
    return graph


def _parts(box: Box, entered: Mapping[int, Sequence[tuple[int, Box]]]) -> list[tuple[int, ...]]:
    """Returns the ranks of a box by the largest smaller box around each; they may share NICs."""
    inside = set(box.ranks)
    parts: dict[int, tuple[int, ...]] = {}
    for rank in box.ranks:
        smaller = [item for item in entered.get(rank, ()) if len(item[1].ranks) < len(box.ranks)]
        number, around = max(
            smaller, key=lambda item: (len(item[1].ranks), item[0]), default=(-1 - rank, None)
        )
        if around is None:
            parts[number] = (rank,)
        elif number not in parts:
            parts[number] = tuple(member for member in around.ranks if member in inside)
    return list(dict.fromkeys(parts.values()))


def _join(
    graph: nx.Graph[object], switch: object, part: int, ranks: Sequence[int], link: Link
) -> None:
    nics = min(len(ranks), max(1, round(len(ranks) / link.ranks_per_link)))
    for index, rank in enumerate(ranks):
        if nics == len(ranks):
            graph.add_edge(rank, switch, link=link)
            continue
        nic = ("nic", switch, part, index * nics // len(ranks))
        graph.add_node(nic, kind="nic")
        graph.add_edge(rank, nic, link=link)
        graph.add_edge(nic, switch, link=link)


def fold(graph: nx.Graph[object]) -> Topology:
    """Returns the axes of a machine. Raises UserError that names the ranks if it does not fold."""
    ranks = _ranks(graph.nodes)
    expected = range(max(ranks, default=-1) + 1)
    if missing := sorted(set(expected) - set(ranks)):
        raise UserError(
            f"{_format_ranks(missing)} missing; ranks are numbered from 0 without a gap"
        )
    axes: list[Axis] = []
    for boxes in _levels(graph):
        inner = math.prod(axis.size for axis in axes)
        size = _box_size(boxes, inner, len(ranks))
        if size > inner:
            axes.append(Axis(boxes[0].axis, size // inner, boxes[0].link))
    topology = Topology(graph.graph["name"], tuple(axes), graph.graph["copy_bytes_per_s"])
    if (joined := topology.num_ranks) < len(ranks):
        first, second = range(joined), range(joined, min(2 * joined, len(ranks)))
        raise UserError(
            f"no link joins {_format_ranks(first)} with {_format_ranks(second)}; add a box that "
            "holds all ranks"
        )
    return topology


def _levels(graph: nx.Graph[object]) -> list[list[Box]]:
    """Returns the boxes of each link class, small ones first; of equal sizes the faster first."""
    edges: dict[Link, list[tuple[object, object]]] = {}
    link: Link
    for one, other, link in graph.edges(data="link"):
        edges.setdefault(link, []).append((one, other))
    levels = [_boxes_of_link(graph, link, its) for link, its in edges.items()]
    return sorted(levels, key=lambda boxes: (_largest(boxes), -boxes[0].link.bytes_per_s))


def _boxes_of_link(
    graph: nx.Graph[object], link: Link, edges: Sequence[tuple[object, object]]
) -> list[Box]:
    boxes = []
    for nodes in nx.connected_components(nx.Graph(edges)):
        names = (graph.nodes[node].get("axis") for node in nodes)
        axis = min(filter(None, names), default=link.name)
        boxes.append(Box(axis, link, tuple(_ranks(nodes))))
    return sorted(boxes, key=lambda box: box.ranks)


def _box_size(boxes: Sequence[Box], inner: int, num_ranks: int) -> int:
    """Returns the common size of a class's boxes. Raises UserError if they do not form an axis."""
    link, size = boxes[0].link.name, _largest(boxes)
    for box in boxes:
        if len(box.ranks) != size:
            whole = next(other for other in boxes if len(other.ranks) == size)
            raise UserError(
                f"link {link!r} joins {_format_ranks(box.ranks)} and {_format_ranks(whole.ranks)}; "
                "allowed: boxes of one size"
            )
        if box.ranks[-1] - box.ranks[0] != size - 1 or box.ranks[0] % size:
            raise UserError(
                f"link {link!r} joins {_format_ranks(box.ranks)}; allowed: consecutive ranks that "
                f"begin at a multiple of {size}"
            )
    alone = sorted(set(range(num_ranks)) - {rank for box in boxes for rank in box.ranks})
    if alone:
        raise UserError(
            f"link {link!r} does not reach {_format_ranks(alone)}; allowed: all ranks or none"
        )
    if size % inner:
        raise UserError(
            f"link {link!r} joins {_format_ranks(boxes[0].ranks)}, {size} of them, and cuts boxes "
            f"of {inner} ranks; allowed: whole ones"
        )
    return size


def _largest(boxes: Sequence[Box]) -> int:
    return max(len(box.ranks) for box in boxes)


def _ranks(nodes: Iterable[object]) -> list[int]:
    return sorted(node for node in nodes if isinstance(node, int))


def _format_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 3`, `ranks 0-11` or `ranks 1, 5, 7`; long lists are cut."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"
