# SPDX-License-Identifier: Apache-2.0
"""Tiny graphs by make_fx: placeholders named after the arguments, values on every node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx


def traced(function: Callable[..., Any], *args: Tensor, sizes: str = "fake") -> Graph:
    """The ATen graph of `function(*args)`; with `sizes="symbolic"` every size is a symbol."""
    return make_fx(function, tracing_mode=sizes)(*args).graph


def inputs(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def result(graph: Graph) -> Node:
    (node,) = graph.output_node().all_input_nodes
    return node
