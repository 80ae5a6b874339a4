"""What the collectives of a graph send, and to whom: counted from the graph alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from cocodiff_compile.compat import group_ranks, optimization_hint
from cocodiff_compile.graph.aten import ALL_TO_ALL, bound, is_collective, value_of


@dataclass(frozen=True)
class Collective:
    """One collective as one rank sees it; `sent_bytes[i]` go to `ranks[i]`, itself included."""

    ranks: tuple[int, ...]
    sent_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    size_bytes: int
    messages: int


def collectives_of(graph: Graph) -> tuple[Collective, ...]:
    """In the order of the graph; those over groups that this process does not know are left out.

    An all-to-all sends its splits, any other collective all it holds to every rank. Symbolic sizes
    count as they were when first compiled.
    """
    found = (_collective(node) for node in graph.nodes if is_collective(node))
    return tuple(item for item in found if item is not None)


def _collective(node: Node) -> Collective | None:
    ranks = group_ranks(str(bound(node)["group_name"]))
    if ranks is None:
        return None
    value = value_of(node.all_input_nodes[0])
    size_bytes = optimization_hint(value.numel()) * value.element_size()
    if node.target is not ALL_TO_ALL:
        return Collective(ranks, (size_bytes,) * len(ranks))
    splits = [optimization_hint(split) for split in _splits(node)]
    row_bytes = size_bytes // max(1, sum(splits))
    return Collective(ranks, tuple(split * row_bytes for split in splits))


def _splits(node: Node) -> list[Any]:
    given = bound(node)["input_split_sizes"]
    return [split.meta["val"] if isinstance(split, Node) else split for split in given]


def traffic_between(
    collectives: Iterable[Collective], rank: int, node_of: Callable[[int], int]
) -> Traffic:
    """What `rank` sends to ranks of other nodes. A collective is one message per receiver."""
    sizes = [
        size
        for item in collectives
        for receiver, size in zip(item.ranks, item.sent_bytes, strict=True)
        if node_of(receiver) != node_of(rank)
    ]
    return Traffic(sum(sizes), len(sizes))
