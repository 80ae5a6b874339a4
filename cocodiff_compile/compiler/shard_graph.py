# SPDX-License-Identifier: Apache-2.0
"""Shares the tokens of a plain model out: with whom, by what costs, and the rank as an input.

What is shared out is decided by guesses about the machine, not by measurements: every rank decides
the same without a message, before the ranks have agreed on anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.compat import find_group, group_ranks, outside_the_compiler
from cocodiff_compile.compiler.enclosing_module import enclosing_module, is_inside_a_model
from cocodiff_compile.compiler.stages import Deciding, Sharding
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cut.cut import Cut
from cocodiff_compile.decide.shared_nodes import ShareCosts
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.devices.device import Device
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import bound, is_tensor, value_of
from cocodiff_compile.ir.constants import constants_of
from cocodiff_compile.passes.shard_tokens import KEPT_SHARES, RANK_INPUT
from cocodiff_compile.ranks.agreement.same_inputs import refuse_other_inputs
from cocodiff_compile.ranks.agreement.watch import watched
from cocodiff_compile.ranks.agreement.world import ranks_are_real
from cocodiff_compile.ranks.detect import RankLocation, detect
from cocodiff_compile.ranks.groups import group_of
from cocodiff_compile.shard.model_calls import begun_calls, is_gathered_behind, next_step
from cocodiff_compile.shard.token_share import TokenShare
from cocodiff_compile.shard.whole_of_shares import WHOLE
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.machine import sketch_machine
from cocodiff_compile.topology.presets import PRESETS


def shard_deciding(
    graph: Graph, config: CompileConfig, dry_run: bool, given: Device | None = None
) -> Deciding:
    """Returns what the stages up to recognition decide by; `given` stands in for the device."""
    group, ranks = _group(config, dry_run)
    if len(ranks) < 2:
        return Deciding(config)
    device = next((value_of(node).device for node in graph.nodes if is_tensor(node)), None)
    if device is None:
        return Deciding(config)
    machine = sketch_machine(_topology(config, len(ranks)))
    costs = Costs(given or device_kind(device.type).guess, {group: machine}, config.tapa_mode)
    estimated = ShareCosts(
        costs.device, functools.cache(lambda size: costs.planned(group, size).seconds)
    )
    is_free = config.shard is not None and config.shard.min_gain == 0
    own = ShareCosts(costs.device, lambda _size: 0.0) if is_free else estimated
    is_alone = dry_run and ranks_are_real()  # nobody would gather with this rank
    keeps_shares = enclosing_module() is not None and not is_alone
    return Deciding(config, sharding=Sharding(group, len(ranks), own, estimated, keeps_shares))


def _group(config: CompileConfig, dry_run: bool) -> tuple[str, Sequence[int]]:
    """Returns the name and the ranks of the group that tokens are shared out over."""
    if config.shard is None or not dist.is_initialized():
        return "", ()
    world = dist.group.WORLD
    assert world is not None
    name = config.shard.group or str(world.group_name)
    ranks = group_ranks(name) or ()
    degree = config.shard.degree or len(ranks)
    if degree == len(ranks) or not ranks:
        return name, ranks
    if len(ranks) % degree:
        raise UserError(
            f"option shard['degree'] of backend 'cocodiff' is {degree}; allowed: a number that "
            f"divides the {len(ranks)} ranks of the group"
        )
    begin = ranks.index(dist.get_rank()) // degree * degree
    members = tuple(ranks[begin : begin + degree])
    if degree == 1:
        return name, members
    if dry_run and ranks_are_real():
        raise UserError(
            "option shard['degree']: a dry run cannot make the groups of the ranks that share; "
            "give their process group as shard['group']"
        )
    with outside_the_compiler(), watched(members):
        return str(group_of(members).group_name), members


def _topology(config: CompileConfig, num_ranks: int) -> Topology:
    if isinstance(config.topology, Topology):
        return config.topology.for_ranks(num_ranks)
    if config.topology == "auto":
        return detect([RankLocation("")] * num_ranks).topology
    return PRESETS[config.topology](num_ranks)


@dataclass(frozen=True)
class CapturedInputs:
    """Describes what a graph reads, before shard-tokens: what ranks must have alike."""

    shares: frozenset[int]
    """The inputs that are shares."""
    weights: frozenset[int]
    """The inputs that are parameters and buffers of the model."""
    constants: Mapping[str, Any]
    """What became part of the graph, by what a message calls it."""


@dataclass(frozen=True)
class ShardedGraph:
    """Describes what shard-tokens added to a graph."""

    rank: Any
    """The last input, as a fake tensor that the graph is compiled with."""
    group: str
    kept: Mapping[int, Cut]
    """The outputs that are shares, each with its cut."""
    captured: CapturedInputs

    def callable_as_before(self, compiled: Callable[[list[Any]], Any], compare: str) -> SharedCall:
        """Returns a callable that takes the inputs of the model, without the rank."""
        return SharedCall(compiled, self, compare)


def sharded_graph(
    graph: Graph, num_inputs: int, captured: CapturedInputs, deciding: Deciding
) -> ShardedGraph | None:
    """Returns what shard-tokens added, None if it left the graph as it was."""
    inputs = list(graph.find_nodes(op="placeholder"))
    if len(inputs) == num_inputs or str(inputs[-1].target) != RANK_INPUT:
        return None
    assert deciding.sharding is not None
    kept = graph.output_node().meta.get(KEPT_SHARES, {})
    return ShardedGraph(inputs[-1].meta["val"], deciding.sharding.group, kept, captured)


@dataclass(eq=False)
class SharedCall:
    """Calls a compiled graph with the rank behind the inputs of the model. The first call compares
    the inputs of all ranks, and the constants of the graph: every rank must be called with the
    same. Where a model calls one graph for several blocks, all weights of its first call are
    compared.
    """

    run: Callable[[list[Any]], Any]
    sharded: ShardedGraph
    compare: str
    """Which calls compare, as in `ShardOptions`; empty for a dry run, which asks no other rank."""
    _boxed_call: bool = True
    _rank: torch.Tensor | None = field(default=None, repr=False)
    _first_call: int | None = field(default=None, repr=False)
    """The number of the model's call in which this was called first; -1 outside of a model."""

    def __call__(self, args: list[Any]) -> Any:
        if self.compare:
            self._compare(args)
        args.append(self._rank_tensor())
        results = self.run(args)
        return self._with_shares(list(results)) if self.sharded.kept else results

    def _rank_tensor(self) -> torch.Tensor:
        if self._rank is None:
            own = dist.get_rank(find_group(self.sharded.group))
            self._rank = torch.tensor([own], device=self.sharded.rank.device)
        return self._rank

    def _compare(self, args: Sequence[Any]) -> None:
        given = self._to_compare(args)
        ranks = group_ranks(self.sharded.group)
        if given and ranks and ranks_are_real():
            refuse_other_inputs(given, tuple(ranks))

    def _to_compare(self, args: Sequence[Any]) -> dict[str, Any]:
        """Returns what to compare, by what all ranks know alike: never by addresses."""
        captured = self.sharded.captured
        tensors = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        names = {place: f"input {number}" for number, place in enumerate(tensors)}
        wholes = {
            name: args[place] for place, name in names.items() if place not in captured.shares
        }
        if self._first_call is None or self.compare == "all":
            if self._first_call is None:
                self._first_call = begun_calls() if is_inside_a_model() else -1
            return {**captured.constants, **wholes}
        if self._first_call != begun_calls():
            return {}
        return {names[place]: args[place] for place in tensors if place in captured.weights}

    def _with_shares(self, results: list[Any]) -> list[Any]:
        stays = is_inside_a_model() and is_gathered_behind()
        given = list(results)
        for place, cut in self.sharded.kept.items():
            first = next(other for other, item in enumerate(given) if item is given[place])
            if first < place:  # a result that is returned twice stays one tensor
                results[place] = results[first]
                continue
            rows = given[place].reshape(-1).view(given[place].shape)  # strides that no block sees
            how = "as a share" if stays else "whole"
            origin = f"result {place} of a compiled block, step {next_step()}, handed on {how}"
            share = TokenShare(rows, cut, self.sharded.group, origin=origin)
            results[place] = share if stays else share.whole()
        return results


def captured_inputs(module: GraphModule, inductor_options: Mapping[str, Any]) -> CapturedInputs:
    """Describes the inputs of a graph; makes the whole of a share once."""
    weights = frozenset(inductor_options.get("static_input_idxs", ()))
    return CapturedInputs(_join_wholes(module.graph), weights, constants_of(module))


def _join_wholes(graph: Graph) -> frozenset[int]:
    """Makes the whole of a share once; returns the places of the inputs that are shares."""
    first: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=WHOLE):
        share = bound(node)["share"]
        if share in first:
            node.replace_all_uses_with(first[share])
            graph.erase_node(node)
        first.setdefault(share, node)
    inputs = graph.find_nodes(op="placeholder")
    return frozenset(place for place, node in enumerate(inputs) if node in first)
