# SPDX-License-Identifier: Apache-2.0
"""Puts the ops of a plain function of tensors into a graph, as they look there: ATen, decomposed
the way Inductor wants them, with values and provenance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.compat import trace_decomposed
from cocodiff_compile.ir.aten import provenance_of, value_of


@dataclass(frozen=True)
class Inliner:
    """Traces each function once per shape and type of its arguments; numbers are part of it."""

    graph: Graph
    _traced: dict[Any, GraphModule] = field(default_factory=dict)

    def __call__(self, function: Callable[..., Any], *args: Any, like: Node) -> list[Node]:
        """Inserts where the graph inserts; what stands for each result."""
        nodes = [arg for arg in args if isinstance(arg, Node)]
        traced = self._trace(function, args)
        stands_for: dict[Node, Node] = {}
        inputs = iter(nodes)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                stands_for[node] = next(inputs)
            elif node.op == "call_function":
                copy = self.graph.node_copy(node, stands_for.__getitem__)
                copy.meta = {"val": node.meta["val"], **provenance_of(like)}
                stands_for[node] = copy
            elif node.op == "get_attr":
                raise AssertionError(f"{function} holds a constant tensor, {node.target}")
        results = traced.graph.output_node().args[0]
        found = results if isinstance(results, (list, tuple)) else (results,)
        return [stands_for[node] for node in found]  # type: ignore[index]

    def _trace(self, function: Callable[..., Any], args: tuple[Any, ...]) -> GraphModule:
        key = (function, *(_signature(arg) for arg in args))
        if key not in self._traced:
            nodes = [arg for arg in args if isinstance(arg, Node)]

            def of_tensors(*tensors: torch.Tensor) -> Any:
                left = iter(tensors)
                return function(*(next(left) if isinstance(a, Node) else a for a in args))

            self._traced[key] = trace_decomposed(of_tensors, [value_of(node) for node in nodes])
        return self._traced[key]


def _signature(arg: Any) -> Any:
    if not isinstance(arg, Node):
        return arg
    value = value_of(arg)
    return (tuple(value.shape), value.stride(), value.dtype, value.device)
