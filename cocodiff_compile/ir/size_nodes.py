# SPDX-License-Identifier: Apache-2.0
"""Emits sizes as arguments of calls: numbers as they are, symbolic ones as nodes that compute them.

Such nodes stand in front of everything that a graph computes and read its inputs alone, so that
every call may use them. Each size is computed once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import emit_expression
from cocodiff_compile.ir.aten import aten, emit, is_tensor
from cocodiff_compile.ir.layout import Size, static_size

_NO_CALLS = ("placeholder", "get_attr")
"""Inputs, and constants that may stand among them."""


class SizeNodes:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._first = next(
            node for node in graph.nodes if node.op not in ("placeholder", "get_attr")
        )
        self._nodes: dict[Any, Node] = {}

    def argument(self, size: Size) -> int | Node:
        """Returns a size as an argument of a call."""
        number = static_size(size)
        if number is not None:
            return number
        assert isinstance(size, torch.SymInt)
        expression = size.node.expr
        if expression not in self._nodes:
            with self.graph.inserting_before(self._first):
                symbols = {symbol: self._symbol(symbol) for symbol in expression.free_symbols}
                self._nodes[expression] = emit_expression(self.graph, expression, symbols)
        return self._nodes[expression]

    def _symbol(self, symbol: Any) -> Node:
        """Returns the node of a symbol: an input of the graph, or a size of one."""
        inputs: list[Node] = list(self.graph.find_nodes(op="placeholder"))
        for node in inputs:
            if _is_symbol(node.meta.get("val"), symbol):
                return node
        for node in filter(is_tensor, inputs):
            for dim, size in enumerate(node.meta["val"].shape):
                if _is_symbol(size, symbol):
                    return emit(self.graph, aten.sym_size.int, node, dim, like=node)
        raise AssertionError(f"no input of the graph has the size {symbol}")


def _is_symbol(value: Any, symbol: Any) -> bool:
    return isinstance(value, torch.SymInt) and bool(value.node.expr == symbol)
