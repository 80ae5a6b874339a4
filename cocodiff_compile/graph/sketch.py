"""A copy of a graph to try something on, at a small part of what the graph itself would take.

Its values are shapes, strides and types: tensors without device or memory, one for all that are
alike. What an op makes of them is asked once, however many layers call it. Costs and tasks of a
sketch are those of the graph; no code can be made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from cocodiff_compile.compat import outside_the_compiler
from cocodiff_compile.graph.records import Recognition, copied


class Sketch(Graph):
    """A graph whose values are not told apart where they are alike."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[str, torch.Tensor] = {}
        self._results: dict[tuple[Callable[..., Any], str], Any] = {}

    def alike(self, value: Any) -> Any:
        """What stands for a value of a graph: one tensor for all of its shape, strides and type."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.alike, value))
        if not isinstance(value, torch.Tensor):
            return value
        key = repr((tuple(value.shape), value.stride(), value.dtype))
        if key not in self._tensors:
            with outside_the_compiler():
                self._tensors[key] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="meta"
                )
        return self._tensors[key]

    def called(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What an op gives for values of this graph."""
        key = target, repr((_named(args), _named(kwargs)))
        if key not in self._results:
            with outside_the_compiler():
                result = target(*args, **kwargs)
            self._results[key] = self.alike(result)
        return self._results[key]


def _named(argument: Any) -> Any:
    """An argument, with something short in place of each tensor that no other one has."""
    if isinstance(argument, (tuple, list)):
        return [_named(item) for item in argument]
    if isinstance(argument, Mapping):
        return {name: _named(item) for name, item in argument.items()}
    return f"tensor {id(argument)}" if isinstance(argument, torch.Tensor) else argument


def sketched(graph: Graph, found: Recognition) -> tuple[Graph, Recognition]:
    """A sketch of a graph, and what was found in it."""
    sketch = Sketch()
    recognition = copied(graph, found, sketch)[1]
    for node in sketch.nodes:
        if "val" in node.meta:
            node.meta["val"] = sketch.alike(node.meta["val"])
    return sketch, recognition
