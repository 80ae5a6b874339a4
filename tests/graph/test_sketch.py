# SPDX-License-Identifier: Apache-2.0
"""A sketch: a copy whose values have the layouts of the graph's, and cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import aten, emit, value_of
from cocodiff_compile.ir.records import Recognition, copied
from cocodiff_compile.ir.sketch import sketched
from tests.support.traced import inputs, traced


def _function(x: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.transpose(0, 1) + 1, x.transpose(0, 1) * 2, number + 1


def _graph(sizes: str = "fake") -> Graph:
    return traced(_function, torch.ones(4, 6), torch.ones(3, dtype=torch.int64), sizes=sizes)


def _layout(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_layout(item) for item in value]
    return str((value.shape, value.stride(), value.dtype))


EMITTED: dict[str, Callable[[Node], tuple[Any, ...]]] = {
    "a sum": lambda node: (aten.add.Tensor, node, node),
    "a view": lambda node: (aten.permute.default, node, [1, 0]),
    "rows": lambda node: (aten.slice.Tensor, node, 0, 2, 5),
    "several": lambda node: (aten.split.Tensor, node, 4),
    "a product": lambda node: (aten.mm.default, node, inputs(node.graph)[0]),
    "joined": lambda node: (aten.cat.default, [node, node], 1),
}


@pytest.mark.parametrize("name", EMITTED)
@pytest.mark.parametrize("sizes", ["fake", "symbolic"])
def test_what_is_emitted_has_the_layout_it_has_in_the_graph(name: str, sizes: str) -> None:
    graph = _graph(sizes)
    values = []
    for made, _ in (copied(graph, Recognition()), sketched(graph, Recognition())):
        (node, *_) = made.find_nodes(op="call_function", target=aten.add.Tensor)
        with made.inserting_after(node):
            values.append(emit(made, *EMITTED[name](node), like=node).meta["val"])
    assert _layout(values[0]) == _layout(values[1])


def test_values_that_are_alike_are_one() -> None:
    sketch, _ = sketched(_graph(), Recognition())
    first, second = (
        value_of(sketch.find_nodes(op="call_function", target=target)[0])
        for target in (aten.add.Tensor, aten.mul.Tensor)
    )
    assert first is second


def test_numbers_of_different_types_are_told_apart() -> None:
    sketch, _ = sketched(_graph(), Recognition())
    _, integers = inputs(sketch)
    with sketch.inserting_after(integers):
        types = [
            value_of(emit(sketch, aten.mul.Tensor, integers, number, like=integers)).dtype
            for number in (1, 1.0)
        ]
    assert types == [torch.int64, torch.float32]


def test_the_graph_itself_is_left_alone() -> None:
    graph = _graph()
    values = [node.meta.get("val") for node in graph.nodes]
    sketched(graph, Recognition())
    assert all(
        node.meta.get("val") is value for node, value in zip(graph.nodes, values, strict=True)
    )
