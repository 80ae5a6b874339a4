# SPDX-License-Identifier: Apache-2.0
"""Plain functions put into graphs: the same values, as ATen, with all that nodes of graphs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.ir.inline import Inliner
from tests.support.traced import inputs, result, traced


def graph_of_sum() -> Graph:
    """x + y, two inputs of the same shape."""
    graph = traced(lambda x, y: x + y, torch.ones(2, 3), torch.ones(2, 3))
    result(graph).meta["stack_trace"] = "where it was written"
    return graph


def put(graph: Graph, function: Callable[..., Any], *args: Any) -> list[Node]:
    with graph.inserting_before(graph.output_node()):
        return Inliner(graph)(function, *args, like=result(graph))


def returned(graph: Graph, nodes: list[Node], *values: Tensor) -> Any:
    graph.output_node().args = (tuple(nodes),)
    graph.lint()
    return GraphModule({}, graph)(*values)


def two_results(x: Tensor, factor: int, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.nn.functional.silu(x) * factor, torch.where(y > 0, y, x).sum()


def test_a_function_gives_in_a_graph_what_it_gives_outside() -> None:
    graph = graph_of_sum()
    x, _ = inputs(graph)
    nodes = put(graph, two_results, x, 3, result(graph))
    assert len(nodes) == 2
    values = torch.randn(2, 3), torch.randn(2, 3)
    expected = two_results(values[0], 3, values[0] + values[1])
    for ours, theirs in zip(returned(graph, nodes, *values), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_tensor_is_one_result_and_the_same_argument_may_come_twice() -> None:
    graph = graph_of_sum()
    x, _ = inputs(graph)
    (product,) = put(graph, torch.mul, x, x)
    values = torch.randn(2, 3), torch.randn(2, 3)
    (found,) = returned(graph, [product], *values)
    assert torch.equal(found, values[0] * values[0])


def test_every_node_has_a_value_and_the_provenance_it_is_given() -> None:
    graph = graph_of_sum()
    before = set(graph.nodes)
    x, y = inputs(graph)
    put(graph, two_results, x, 3, y)
    added = [node for node in graph.nodes if node not in before]
    assert added
    for node in added:
        assert isinstance(node.target, torch._ops.OpOverload)
        assert isinstance(node.meta["val"], Tensor)
        assert node.meta["stack_trace"] == "where it was written"


def test_ops_are_decomposed() -> None:
    graph = graph_of_sum()
    x, _ = inputs(graph)
    put(graph, torch.nn.functional.silu, x)
    targets = {node.target for node in graph.nodes}
    assert torch.ops.aten.silu.default not in targets
    assert torch.ops.aten.exp.default in targets


def test_nodes_stand_where_the_graph_inserts() -> None:
    graph = graph_of_sum()
    x, _ = inputs(graph)
    total = result(graph)
    with graph.inserting_before(total):
        (negative,) = Inliner(graph)(torch.neg, x, like=total)
    assert negative.next is total


def test_a_function_is_traced_once_per_shape_type_and_number() -> None:
    calls: list[Any] = []

    def scaled(x: Tensor, factor: int) -> Tensor:
        calls.append((tuple(x.shape), x.dtype, factor))
        return x * factor

    graph = traced(lambda x, y: x + y.sum(), torch.ones(2, 3), torch.ones(3))
    x, y = inputs(graph)
    inline = Inliner(graph)
    with graph.inserting_before(graph.output_node()):
        nodes = [
            inline(scaled, *arguments, like=x)[0]
            for arguments in ((x, 2), (x, 2), (x, 3), (y, 2), (result(graph), 2))
        ]
    assert [factor for _, _, factor in calls] == [2, 3, 2]
    assert len(set(nodes)) == 5
    values = torch.randn(2, 3), torch.randn(3)
    total = values[0] + values[1].sum()
    expected = (values[0] * 2, values[0] * 2, values[0] * 3, values[1] * 2, total * 2)
    found = returned(graph, nodes, *values)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_function_with_a_tensor_of_its_own_is_refused() -> None:
    """It would be an attribute that graphs have no place for."""
    own = torch.ones(3)
    graph = graph_of_sum()
    x, _ = inputs(graph)
    with pytest.raises((AssertionError, RuntimeError)):
        put(graph, lambda x: x + own, x)
