"""All ranks of a graph in one process, node by node: values in, values out, on every rank.

Every rank runs the same graph on data of its own. A collective is a step that all ranks take
together: `Groups` says which ranks each of them would find behind a group's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, WAIT, bound
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.machine import Machine, sketch_machine
from tests.support.captured import INPUT_NAMES, capture_call

Groups = Mapping[str, Callable[[int], Sequence[int]]]
"""Group name -> rank -> the ranks of that rank's group of this name, in order."""


def machine_groups(flat_name: str, machine: Machine) -> Groups:
    """The groups of a machine whose ranks are numbered from 0, and the one it fills."""
    topology = machine.topology

    def along(axes: Sequence[str]) -> Callable[[int], Sequence[int]]:
        return lambda rank: topology.ranks_along(rank, axes)

    groups = {name: along(axes) for axes, name in machine.groups.items()}
    return {**groups, flat_name: along(topology.axis_names)}


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


# The proof: a rewritten graph gives on every rank what the captured one gives


GRIDS = {"2x3": (2, 3), "2x2x2": (2, 2, 2), "2x6": (2, 6), "2x6x2": (2, 6, 2), "2x6x8": (2, 6, 8)}


def machine(*sizes: int) -> Machine:
    link = Link("link", 1e9, 2e9, 1e-6)
    names = ("tile", "gpu", "node")
    axes = tuple(Axis(name, size, link) for name, size in zip(names, sizes, strict=False))
    return sketch_machine(Topology("grid", axes, 1e9))


def equal_on_every_rank(
    ours: Sequence[Sequence[torch.Tensor]], flat: Sequence[Sequence[torch.Tensor]]
) -> bool:
    return all(
        torch.equal(mine, theirs)
        for rank, results in enumerate(ours)
        for mine, theirs in zip(results, flat[rank], strict=True)
    )


def captured_model(
    name: str, num_layers: int = 1, head_size: int = 8, **tokens: int
) -> tuple[GraphModule, list[Any], int]:
    """A public model with some layers of each kind, the values it is called with, and how many
    Ulysses attentions it has. Among the ranks of a group.
    """
    small = SMALL_MODELS[name]
    model = small.build(num_layers=num_layers, heads=24, head_size=head_size)
    inputs = small.inputs(model, **tokens)
    parallelize(model)
    return *capture_call(model, **inputs), small.num_ulysses_attentions(model)


def run_both(
    ours: GraphModule, captured: GraphModule, values: Sequence[Any], on: Machine
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Returns the outputs of both graphs on ranks that each hold other data."""
    inputs = per_rank(values, captured.meta[INPUT_NAMES], on.topology.num_ranks)
    groups = machine_groups("0", on)
    return run_lockstep(ours.graph, inputs, groups), run_lockstep(captured.graph, inputs, groups)


def per_rank(values: Sequence[Any], names: Sequence[str], num_ranks: int) -> list[list[Any]]:
    """The same weights on every rank, and other data."""

    def own(value: Any, name: str, rank: int) -> Any:
        is_data = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_data or "_parameters_" in name or "_buffers_" in name:
            return value
        noise = torch.Generator().manual_seed(rank)
        return value + torch.randn(value.shape, generator=noise).to(value.dtype)

    return [
        [own(value, name, rank) for value, name in zip(values, names, strict=True)]
        for rank in range(num_ranks)
    ]
