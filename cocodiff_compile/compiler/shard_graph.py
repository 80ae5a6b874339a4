"""Shares the tokens of a plain model out: with whom, by what costs, and the rank as an input.

What is shared out is decided by guesses about the machine, not by measurements: every rank decides
the same without a message, before the ranks have agreed on anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.fx import Graph

from cocodiff_compile.compat import find_group, group_ranks
from cocodiff_compile.compiler.stages import Deciding
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.shared_nodes import ShareCosts
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.aten import is_tensor, value_of
from cocodiff_compile.passes.shard_tokens import RANK_INPUT
from cocodiff_compile.ranks.agreement.all_ranks import gathered
from cocodiff_compile.ranks.detect import RankLocation, detect
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.machine import sketch_machine
from cocodiff_compile.topology.presets import PRESETS

_DIGESTED_BYTES = 1 << 22
"""How much of a tensor is summed at once."""


def shard_deciding(graph: Graph, config: CompileConfig) -> Deciding:
    """Returns what the stages up to recognition decide by."""
    group = _group_name(config)
    ranks = group_ranks(group) if group else None
    if ranks is None or len(ranks) < 2:
        return Deciding(config)
    device = next(value_of(node).device for node in graph.nodes if is_tensor(node))
    machine = sketch_machine(_topology(config, len(ranks)))
    costs = Costs(device_kind(device.type).guess, {group: machine}, config.tapa_mode)
    is_free = config.shard is not None and config.shard.min_gain == 0
    own = ShareCosts(
        costs.device, lambda size: 0.0 if is_free else costs.planned(group, size).seconds
    )
    return Deciding(config, shard_group=(group, len(ranks), own))


def _group_name(config: CompileConfig) -> str:
    if config.shard is None or not dist.is_initialized():
        return ""
    world = dist.group.WORLD
    assert world is not None
    return config.shard.group or str(world.group_name)


def _topology(config: CompileConfig, num_ranks: int) -> Topology:
    if isinstance(config.topology, Topology):
        return config.topology.for_ranks(num_ranks)
    if config.topology == "auto":
        return detect([RankLocation("")] * num_ranks).topology
    return PRESETS[config.topology](num_ranks)


@dataclass(frozen=True)
class RankInput:
    """The last input of a graph whose tokens are shared out."""

    value: Any
    """The fake tensor that the graph is compiled with."""
    group: str

    def appended(self, compiled: Callable[[list[Any]], Any]) -> SharedCall:
        """Returns a callable that takes the inputs of the model, without the rank."""
        return SharedCall(compiled, self.group, self.value.device)


def rank_input(graph: Graph, num_inputs: int, config: CompileConfig) -> RankInput | None:
    """Returns the input that shard-tokens added, None if it left the graph as it was."""
    added = list(graph.find_nodes(op="placeholder"))[num_inputs:]
    if not any(str(node.target) == RANK_INPUT for node in added):
        return None
    return RankInput(added[0].meta["val"], _group_name(config))


@dataclass(eq=False)
class SharedCall:
    """Calls a compiled graph with the rank behind the inputs of the model. The first call compares
    the inputs of all ranks, weights included: every rank must be called with the same.
    """

    run: Callable[[list[Any]], Any]
    group: str
    device: torch.device
    _boxed_call: bool = True
    _rank: torch.Tensor | None = field(default=None, repr=False)

    def __call__(self, args: list[Any]) -> Any:
        if self._rank is None:
            group = find_group(self.group)
            if dist.get_backend(group) != "fake":
                _refuse_other_inputs(args, group)
            self._rank = torch.tensor([dist.get_rank(group)], device=self.device)
        args.append(self._rank)
        return self.run(args)


def _refuse_other_inputs(args: list[Any], group: Any) -> None:
    """Raises UserError on every rank if a rank is called with other values than the first one."""
    own = [_digest(value) for value in args]
    everyone = gathered(own, group)
    for rank, theirs in enumerate(everyone):
        for number, (first, value) in enumerate(zip(everyone[0], theirs, strict=False)):
            if first != value:
                ranks = dist.get_process_group_ranks(group)
                raise UserError(
                    f"option 'shard': rank {ranks[rank]} was called with another value than rank "
                    f"{ranks[0]} in input {number} of {len(own)} ({_described(args[number])}); "
                    "every rank must have the same weights and be called with the same inputs: "
                    "seed random numbers alike"
                )


def _digest(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (value,)
    memory = value.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = []
    for begin in range(0, len(memory), _DIGESTED_BYTES):
        part = memory[begin : begin + _DIGESTED_BYTES]
        places = torch.arange(1, len(part) + 1, device=part.device)
        sums.append(int((part.to(torch.int64) * places).sum()))
    return (str(value.dtype), tuple(value.shape), *sums)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
