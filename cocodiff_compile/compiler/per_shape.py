# SPDX-License-Identifier: Apache-2.0
"""Compiles a graph with symbolic sizes once for every set of sizes that it is called with.

Dynamo captures a graph for any size when a model is called with a second resolution. If its tokens
do not divide by the ranks (`shard/any_size.py`), shares have to be cut at numbers: then the graph
is compiled for the sizes of each call. From `MAX_SIZES` on it is compiled once more, for any size,
usually without sharing tokens out.

Dynamo then also makes inputs of floats that changed, which the graph reads with `item`. Those are
numbers of the call, too: outside of Dynamo nothing is known of what `item` would return.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from cocodiff_compile.compat import compiling_later, copied_capture
from cocodiff_compile.ranks.agreement.watch import reports_failures
from cocodiff_compile.say_once import say_once
from cocodiff_compile.shard.token_share import TokenShare

log = logging.getLogger(__name__)

MAX_SIZES = 16
"""The number of sets of sizes that a graph is compiled for. A number that changes from step to
step would otherwise be compiled for every step.
"""


def has_symbolic_sizes(module: GraphModule) -> bool:
    """Returns whether an input of a graph is a symbolic number, or a tensor with a symbolic size;
    that of a share is no input of its own.
    """
    sizes = [item for value in _symbolic_inputs(module) for item in _sizes(value)]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _symbolic_inputs(module: GraphModule) -> list[Any]:
    """Returns the inputs as Dynamo captured them."""
    inputs = module.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value") for node in inputs]


def _sizes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, TokenShare):
        return (*value.share.shape, value.cut)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)


def _is_float(placeholder: Node) -> bool:
    """Returns whether an input is a float that Dynamo put into a tensor."""
    value = placeholder.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype is not torch.float64:
        return False
    return bool(placeholder.users) and all(user.target == "item" for user in placeholder.users)


def _instead(item: Node, number: float, node: Node) -> Node | float:
    return number if node is item else node


def _insert_floats(module: GraphModule, floats: Mapping[int, float]) -> None:
    """Replaces what is read from some inputs, by their places, by numbers."""
    placeholders = module.graph.find_nodes(op="placeholder")
    for place, number in floats.items():
        for item in list(placeholders[place].users):
            given = functools.partial(_instead, item, number)
            for user in list(item.users):
                user.args, user.kwargs = map_arg((user.args, user.kwargs), given)
            module.graph.erase_node(item)
    module.recompile()


@dataclass(eq=False)
class PerShape:
    """Calls the code for the sizes of its inputs; compiles it at the first call with them."""

    module: GraphModule
    compile: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
    _compiled: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict, repr=False)
    _for_any_size: Callable[..., Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._inputs = _symbolic_inputs(self.module)
        placeholders = self.module.graph.find_nodes(op="placeholder")
        self._floats = [place for place, node in enumerate(placeholders) if _is_float(node)]

    def __call__(self, *args: Any) -> Any:
        floats = {place: args[place].item() for place in self._floats}
        key = (*map(_sizes, args), *floats.values())
        if key not in self._compiled and len(self._compiled) == MAX_SIZES:
            return self._call_for_any_size(*args)
        if key not in self._compiled:
            log.info("shard: compiling for sizes that were not met before")
            module = copied_capture(self.module)
            _insert_floats(module, floats)
            with reports_failures():
                self._compiled[key] = self.compile(module, args)
        return self._compiled[key](*args)

    def _call_for_any_size(self, *args: Any) -> Any:
        if self._for_any_size is None:
            say_once(
                log,
                logging.WARNING,
                f"option 'shard': a graph was called with more than {MAX_SIZES} sets of sizes: "
                "others share one graph, possibly without sharing tokens out; compile the model "
                "with dynamic=False, or give it tensors instead of numbers that change from call "
                "to call",
            )
            with reports_failures(), compiling_later(self._inputs):
                self._for_any_size = self.compile(self.module, self._inputs)
        return self._for_any_size(*args)
