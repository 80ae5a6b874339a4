# SPDX-License-Identifier: Apache-2.0
"""Runs all ranks of a graph in one process, node by node: values in, values out, on every rank.

Every rank runs the same graph on data of its own. A collective is a step that all ranks take
together: `Groups` says which ranks each of them would find behind a group's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, WAIT, bound

Groups = Mapping[str, Callable[[int], Sequence[int]]]
"""Group name -> rank -> the ranks of that rank's group of this name, in order."""


def run_lockstep(
    graph: Graph,
    inputs: Sequence[Sequence[Any]],
    groups: Groups,
    instead: Mapping[Node, Sequence[Any]] | None = None,
) -> list[tuple[Any, ...]]:
    """Returns the outputs of `graph` on every rank. `inputs` holds the arguments of each rank;
    `instead` holds, for some nodes, the values of each rank in place of what they would compute.
    """
    instead = instead or {}
    num_ranks = len(inputs)
    values: list[dict[Node, Any]] = [{} for _ in range(num_ranks)]
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        for rank in range(num_ranks):
            values[rank][node] = inputs[rank][place]
    last_use = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph.owning_module, node.target)
            for mine in values:
                mine[node] = constant
        if node.op == "call_function":
            found = instead[node] if node in instead else _step(node, values, groups)
            for rank, value in enumerate(found):
                values[rank][node] = value
        for done in last_use.get(node, ()):
            for mine in values:
                mine.pop(done, None)
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
            return [torch.fx.node.map_arg(tuple(results), mine.__getitem__) for mine in values]
    raise AssertionError("a graph has an output")


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last.update(dict.fromkeys(node.all_input_nodes, node))
    for node in graph.output_node().all_input_nodes:
        last.pop(node, None)
    by_user: dict[Node, list[Node]] = {}
    for node, user in last.items():
        by_user.setdefault(user, []).append(node)
    return by_user


def _step(node: Node, values: list[dict[Node, Any]], groups: Groups) -> list[Any]:
    arguments = [
        torch.fx.node.map_arg((node.args, node.kwargs), mine.__getitem__) for mine in values
    ]
    if node.target is WAIT:
        return [args[0] for args, _ in arguments]
    if node.target in (ALL_TO_ALL, ALL_GATHER):
        members = groups[bound(node)["group_name"]]
        step = _all_to_all if node.target is ALL_TO_ALL else _all_gather
        return step([args for args, _ in arguments], members)
    return [node.target(*args, **kwargs) for args, kwargs in arguments]  # type: ignore[operator]


def _all_to_all(
    arguments: list[Sequence[Any]], members: Callable[[int], Sequence[int]]
) -> list[Tensor]:
    sent = [args[0].split(list(args[2])) for args in arguments]
    received = []
    for rank, args in enumerate(arguments):
        parts = [sent[peer][members(peer).index(rank)] for peer in members(rank)]
        assert [len(part) for part in parts] == list(args[1]), "splits of sender and receiver"
        received.append(torch.cat(parts))
    return received


def _all_gather(
    arguments: list[Sequence[Any]], members: Callable[[int], Sequence[int]]
) -> list[Tensor]:
    return [
        torch.cat([arguments[peer][0] for peer in members(rank)]) for rank in range(len(arguments))
    ]
