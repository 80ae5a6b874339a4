"""Graphs as the backend sees them: a fake process group, and a capture without code generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from cocodiff_compile.backends.cocodiff import compile_graph
from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.config import CompileConfig

INPUT_NAMES = "input_names"
"""Key of `GraphModule.meta`: what Dynamo calls each placeholder, parameters among them."""


@contextmanager
def fake_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group of `num_ranks` in this process; what its collectives return is junk."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


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
    """A backend for torch.compile that keeps the ATen graphs and runs them as they are."""
    config = CompileConfig.from_options({"disable": ["recognize-ulysses"]})

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]

        def record(captured: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
            captured.meta[INPUT_NAMES] = names
            graphs.append(captured)
            return make_boxed_func(captured.forward)

        return compile_graph(gm, example_inputs, config, record)

    return backend


def weight_name(gm: GraphModule, matmul: Node) -> str:
    """Dynamo's name of the input that a projection multiplies with, such as `l_..to_q..weight_`."""
    weight = matmul.args[-1]
    while isinstance(weight, Node) and weight.op == "call_function":
        (weight,) = weight.all_input_nodes
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    return str(gm.meta[INPUT_NAMES][placeholders.index(weight)]).lower()


def is_weight_of(gm: GraphModule, matmul: Node, module: str) -> bool:
    """Whether a projection multiplies with the weight of the submodule `module`."""
    return f"_modules_{module}_parameters_weight" in weight_name(gm, matmul)
