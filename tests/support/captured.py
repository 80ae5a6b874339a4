# SPDX-License-Identifier: Apache-2.0
"""Graphs as the backend sees them: a fake process group, and a capture without code generation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from tests.support.idioms import IDIOMS

__all__ = ["INPUT_NAMES", "capture", "capture_calls", "fake_ranks", "is_weight_of", "weight_name"]

INPUT_NAMES = "input_names"
"""Key of `GraphModule.meta`: what Dynamo calls each placeholder, parameters among them."""
INPUT_VALUES = "input_values"
"""Key of `GraphModule.meta`: what the graph was last called with."""


def capture(
    model: Callable[..., Any], *args: Any, dynamic: bool | None = None
) -> list[GraphModule]:
    """The functional ATen inference graphs of `model(*args)`, before any pass of ours."""
    return capture_calls(model, [args], dynamic)


def capture_calls(
    model: Callable[..., Any], calls: Sequence[Sequence[Any]], dynamic: bool | None = None
) -> list[GraphModule]:
    """The graphs of several calls of one compiled model, in the order of their compilation."""
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=recording_backend(graphs), dynamic=dynamic)
    with torch.no_grad():
        for args in calls:
            compiled(*args)
    return graphs


def recording_backend(graphs: list[GraphModule]) -> Callable[..., Any]:
    """A backend for torch.compile that keeps the ATen graphs, with the names and values of inputs,
    and runs them as they are.
    """
    config = CompileConfig.from_options({"disable": ["recognize-ulysses"]})

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = [
            str(node.target)
            for node, given in zip(placeholders, example_inputs, strict=True)
            for _ in range(_num_tensors(given))
        ]

        def record(captured: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
            captured.meta[INPUT_NAMES] = names
            graphs.append(captured)

            def call(*values: Any) -> Any:
                captured.meta[INPUT_VALUES] = list(values)
                return captured.forward(*values)

            return make_boxed_func(call)

        return compile_graph(gm, example_inputs, config, record)

    return backend


@functools.cache
def captured_idiom(name: str, num_ranks: int) -> tuple[GraphModule, list[Any]]:
    """The graph of a hand-written attention on so many ranks, and the values it is called with;
    captured once for all tests, which work on copies.
    """
    (idiom,) = (replace(item, num_ranks=num_ranks) for item in IDIOMS if item.name == name)
    with fake_ranks(num_ranks):
        return capture_call(idiom.model(), *idiom.arguments(), dynamic=idiom.dynamic)


def _num_tensors(given: Any) -> int:
    """Returns the number of graph inputs that a value becomes: several if it is a tensor subclass,
    such as a quantised weight.
    """
    if not is_traceable_wrapper_subclass(given):
        return 1
    inner, _ = given.__tensor_flatten__()
    return sum(_num_tensors(getattr(given, name)) for name in inner)


def capture_call(
    model: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any
) -> tuple[GraphModule, list[Any]]:
    """The graph of a model that is captured in one piece, and the values it is called with."""
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    backend = recording_backend(graphs)
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    (gm,) = graphs
    return gm, gm.meta[INPUT_VALUES]


def weight_name(gm: GraphModule, matmul: Node) -> str:
    """Dynamo's name of the input that a projection multiplies with, such as `l_..to_q..weight_`."""
    weight = matmul.args[-1]
    while isinstance(weight, Node) and weight.op == "call_function":
        (weight,) = weight.all_input_nodes
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    return str(gm.meta[INPUT_NAMES][placeholders.index(weight)]).lower()


def is_weight_of(gm: GraphModule, matmul: Node, module: str) -> bool:
    """Returns whether a projection multiplies with the weight of the submodule `module`."""
    return f"_modules_{module}_parameters_weight" in weight_name(gm, matmul)
