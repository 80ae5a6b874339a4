# SPDX-License-Identifier: Apache-2.0
"""Reads collectives from a graph: which there are, what they exchange, and who waits for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import WAIT_FOR_SEVERAL
from cocodiff_compile.ir.aten import WAIT, bound
from cocodiff_compile.ir.layout import Size, same


@dataclass(frozen=True)
class AllToAll:
    """An `all_to_all_single` and its wait, read from the graph."""

    start: Node
    wait: Node
    source: Node
    group: str
    output_splits: tuple[Size, ...]
    input_splits: tuple[Size, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.input_splits)

    @property
    def has_equal_splits(self) -> bool:
        splits = (*self.input_splits, *self.output_splits)
        return all(same(split, splits[0]) for split in splits)


def parse_all_to_all(start: Node) -> AllToAll | None:
    """Returns the exchange that begins at `start`, or None if nothing waits for it."""
    waits = [user for user in start.users if user.target is WAIT]
    if not waits:
        return None
    wait = waits[0]
    while [user.target for user in wait.users] == [WAIT]:
        (wait,) = (
            wait.users
        )  # functional wrappers may wait twice; the last wait is the one that counts
    arguments = bound(start)
    return AllToAll(
        start=start,
        wait=wait,
        source=arguments["input"],
        group=arguments["group_name"],
        output_splits=_sizes(arguments["output_split_sizes"]),
        input_splits=_sizes(arguments["input_split_sizes"]),
    )


def _sizes(values: list[Any]) -> tuple[Size, ...]:
    return tuple(value.meta["val"] if isinstance(value, Node) else value for value in values)


def erase_collective(graph: Graph, start: Node) -> None:
    """Erases a collective that nobody reads any more. Waits count as side effects, which dead-code
    elimination keeps: they go by hand.
    """
    for wait in reversed(waits_behind(start)):
        graph.erase_node(wait)
    graph.erase_node(start)


def waits_behind(node: Node) -> list[Node]:
    """Returns the waits for `node`, and those for these waits, inner ones last."""
    waits = [user for user in node.users if is_wait(user)]
    return [item for wait in waits for item in (wait, *waits_behind(wait))]


_WAITS = frozenset(filter(None, (WAIT, WAIT_FOR_SEVERAL)))


def is_wait(node: Node) -> bool:
    """Returns whether a node waits for a collective, or for all results of a coalesced one."""
    return node.op == "call_function" and node.target in _WAITS


def is_collective(node: Node) -> bool:
    """Returns whether a node starts a functional collective, whose result needs a wait.

    By namespace: a collective that a new torch adds there must end walks too.
    """
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and node.target not in _WAITS
    )


def is_all_to_all(node: Node) -> bool:
    """Returns whether a node is an all-to-all by any op, of torch or of somebody else:
    `ALL_TO_ALL`, `_dtensor.shard_dim_alltoall`, or whatever calls itself so.
    """
    return isinstance(node.target, torch._ops.OpOverload) and _is_named_all_to_all(node.target)


@functools.cache
def _is_named_all_to_all(target: torch._ops.OpOverload) -> bool:
    name = target._schema.name.split("::")[-1].lower().replace("_", "")
    return "alltoall" in name or "all2all" in name


_COMMUNICATING = frozenset({"c10d", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
"""Namespaces of collectives that wait for themselves, beside `_c10d_functional`."""


def communicates(node: Node) -> bool:
    """Returns whether a node is a collective of any kind, with a wait or without."""
    return (
        is_collective(node)
        or is_all_to_all(node)
        or getattr(node.target, "namespace", "") in _COMMUNICATING
    )


def collectives_by_group(graph: Graph) -> dict[str, list[Node]]:
    """Returns the collectives of a graph, in its order, by the name of their group."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        name = bound(node).get("group_name") if is_collective(node) else None
        if isinstance(name, str):
            found.setdefault(name, []).append(node)
    return found
