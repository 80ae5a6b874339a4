# SPDX-License-Identifier: Apache-2.0
"""Proofs on simulated ranks: machines, captured models, and values compared on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.fx import GraphModule

from cocodiff_compile.lab.coverage.examine import sharded_copy
from cocodiff_compile.lab.lockstep import Groups, run_lockstep
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.passes.shard_tokens import RANK_INPUT
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.machine import Machine, sketch_machine
from tests.support.captured import INPUT_NAMES, capture_call


def machine_groups(flat_name: str, machine: Machine) -> Groups:
    """The groups of a machine whose ranks are numbered from 0, and the one it fills."""
    topology = machine.topology

    def along(axes: Sequence[str]) -> Callable[[int], Sequence[int]]:
        return lambda rank: topology.ranks_along(rank, axes)

    groups = {name: along(axes) for axes, name in machine.groups.items()}
    return {**groups, flat_name: along(topology.axis_names)}


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
    """A public model with some layers of each kind, shared out by the compiler, the values it is
    called with, and how many Ulysses attentions it has. Among the ranks of a group.
    """
    small = SMALL_MODELS[name]
    model = small.build(num_layers=num_layers, heads=24, head_size=head_size)
    inputs = small.inputs(model, **tokens)
    gm, values = capture_call(model, **inputs)
    ours, _ = sharded_copy(gm, dist.get_world_size())
    ours.meta[INPUT_NAMES] = [*gm.meta[INPUT_NAMES], RANK_INPUT]
    return ours, [*values, torch.tensor([0])], small.num_ulysses_attentions(model)


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
        if name == RANK_INPUT:
            return torch.tensor([rank])
        is_data = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_data or "_parameters_" in name or "_buffers_" in name:
            return value
        noise = torch.Generator().manual_seed(rank)
        return value + torch.randn(value.shape, generator=noise).to(value.dtype)

    return [
        [own(value, name, rank) for value, name in zip(values, names, strict=True)]
        for rank in range(num_ranks)
    ]
