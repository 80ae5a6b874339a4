# SPDX-License-Identifier: Apache-2.0
"""A copy of a graph to try something on, at a small part of what the graph itself would take.

All values of one layout are one tensor, and what an op makes of them is asked once, however many
layers call it. Costs and tasks of a sketch are those of the graph. No code can be made of it: which
values share memory is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from cocodiff_compile.ir.records import Recognition, copied


class Sketch(Graph):
    """A graph whose values are not told apart where they are alike."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[str, torch.Tensor] = {}
        self._results: dict[tuple[Callable[..., Any], str], Any] = {}

    def alike(self, value: Any) -> Any:
        """Returns the first tensor of a value's shape, strides, type and device."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.alike, value))
        if not isinstance(value, torch.Tensor):
            return value
        layout = repr((tuple(value.shape), value.stride(), value.dtype, value.device))
        return self._tensors.setdefault(layout, value)

    def called(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns what an op gives for values of this graph."""
        key = target, repr((_named(args), _named(kwargs)))
        if key not in self._results:
            self._results[key] = self.alike(target(*args, **kwargs))
        return self._results[key]


def _named(argument: Any) -> Any:
    """An argument, with something short in place of each tensor that no other one has."""
    if isinstance(argument, (tuple, list)):
        return [_named(item) for item in argument]
    if isinstance(argument, Mapping):
        return {name: _named(item) for name, item in argument.items()}
    return f"tensor {id(argument)}" if isinstance(argument, torch.Tensor) else argument


def sketched(graph: Graph, recognition: Recognition) -> tuple[Graph, Recognition]:
    """Returns a sketch of a graph, and its recognition."""
    sketch = Sketch()
    _, recognition = copied(graph, recognition, sketch)
    for node in sketch.nodes:
        if "val" in node.meta:
            node.meta["val"] = sketch.alike(node.meta["val"])
    return sketch, recognition
