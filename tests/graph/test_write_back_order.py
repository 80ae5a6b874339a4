# SPDX-License-Identifier: Apache-2.0
"""Copies into inputs of a graph: made as early as they can be, never before another reader."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.ir.aten import aten, base_of
from cocodiff_compile.schedule.graph_tasks import is_anchor, is_write_back, node_order, reorder
from tests.support.traced import inputs, traced

SQUARE = (2, 2)


def write_back(graph: Graph, into: Node, value: Node, name: str = "copy") -> Node:
    """A copy at the end of a graph, as functional graphs have them."""
    with graph.inserting_before(graph.output_node()):
        arguments = (into, value)
        node = graph.create_node("call_function", aten.copy_.default, arguments, name=name)
    node.meta["val"] = into.meta["val"]
    return node


def reordered(graph: Graph, order: Sequence[int] | None = None) -> list[str]:
    """The graph with its anchors in another order, or in their own; what it calls, in order."""
    anchors = [node for node in graph.nodes if is_anchor(node)]
    reorder(graph, node_order(graph, anchors, tuple(order or range(len(anchors)))))
    graph.lint()
    return [node.name for node in graph.nodes if node.op == "call_function"]


def ones(count: int) -> list[Tensor]:
    return [torch.ones(SQUARE) for _ in range(count)]


def test_a_copy_into_an_input_is_told_from_other_copies() -> None:
    def function(x: Tensor, memory: Tensor) -> Tensor:
        return (x + memory).clone()

    graph = traced(function, *ones(2))
    x, memory = inputs(graph)
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert is_write_back(write_back(graph, memory, add))
    assert not is_write_back(write_back(graph, add, x))
    assert not any(is_write_back(node) for node in (x, memory, add))


def test_a_copy_into_an_input_has_no_place_of_its_own() -> None:
    graph = traced(lambda x, memory: x @ memory, *ones(2))
    x, memory = inputs(graph)
    copy = write_back(graph, memory, x)
    assert not is_anchor(copy)
    assert [node.name for node in graph.nodes if is_anchor(node)] == ["mm"]


def test_a_copy_of_an_input_that_nobody_reads_comes_first() -> None:
    graph = traced(lambda x, _memory: x @ x, *ones(2))
    x, memory = inputs(graph)
    write_back(graph, memory, x)
    assert reordered(graph) == ["copy", "mm"]


def test_a_copy_stands_right_behind_what_it_copies() -> None:
    def function(x: Tensor, y: Tensor, _memory: Tensor) -> Tensor:
        return ((x @ y) @ y) @ y

    graph = traced(function, *ones(3))
    *_, memory = inputs(graph)
    first = next(iter(graph.find_nodes(op="call_function", target=aten.mm.default)))
    write_back(graph, memory, first)
    assert reordered(graph) == ["mm", "copy", "mm_1", "mm_2"]


def test_what_only_a_copy_needs_goes_with_it() -> None:
    def function(x: Tensor, y: Tensor, _memory: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ y
        return (first @ y) @ y, first.abs() + 1

    graph = traced(function, *ones(3))
    *_, memory = inputs(graph)
    result, kept = graph.output_node().args[0]  # type: ignore[misc]
    write_back(graph, memory, kept)
    graph.output_node().args = ((result,),)
    assert reordered(graph) == ["mm", "abs_1", "add", "copy", "mm_1", "mm_2"]


def test_a_copy_waits_for_every_other_reader_of_its_input() -> None:
    def function(x: Tensor, y: Tensor, memory: Tensor) -> Tensor:
        first = x @ y
        return (first @ y) @ memory

    graph = traced(function, *ones(3))
    x, _, memory = inputs(graph)
    write_back(graph, memory, x)
    assert reordered(graph) == ["mm", "mm_1", "mm_2", "copy"]


def test_a_copy_waits_for_readers_that_do_not_compute_much() -> None:
    """A light reader stands right before what needs it, the copy behind that reader."""

    def function(x: Tensor, y: Tensor, memory: Tensor) -> Tensor:
        first = x @ y
        return (first @ y) @ (memory + 1)

    graph = traced(function, *ones(3))
    x, _, memory = inputs(graph)
    write_back(graph, memory, x)
    assert reordered(graph) == ["mm", "mm_1", "add", "copy", "mm_2"]


def test_a_copy_waits_for_readers_of_a_view_of_its_input() -> None:
    def function(x: Tensor, y: Tensor, memory: Tensor) -> Tensor:
        seen = memory.view(4).view(2, 2)
        first = x @ y
        return (first @ y) @ (seen + 1)

    graph = traced(function, *ones(3))
    x, _, memory = inputs(graph)
    write_back(graph, memory, x)
    order = reordered(graph)
    assert order.index("add") < order.index("copy")


def test_a_copy_waits_for_a_reader_that_only_another_copy_needs() -> None:
    def function(x: Tensor, y: Tensor, a: Tensor, _b: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ y
        return first @ y, first + a

    graph = traced(function, *ones(4))
    x, _, a, b = inputs(graph)
    result, value = graph.output_node().args[0]  # type: ignore[misc]
    write_back(graph, a, x, "copy_a")
    write_back(graph, b, value, "copy_b")
    graph.output_node().args = ((result,),)
    order = reordered(graph)
    assert order.index("add") < order.index("copy_a")


def test_a_copy_of_what_is_computed_from_its_own_input_comes_behind_it() -> None:
    def function(x: Tensor, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ y) @ y, memory + x

    graph = traced(function, *ones(3))
    *_, memory = inputs(graph)
    result, updated = graph.output_node().args[0]  # type: ignore[misc]
    write_back(graph, memory, updated)
    graph.output_node().args = ((result,),)
    assert reordered(graph) == ["add", "copy", "mm", "mm_1"]


def test_copies_follow_what_they_copy_into_another_order() -> None:
    def function(x: Tensor, y: Tensor, _a: Tensor, _b: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, y @ x

    graph = traced(function, *ones(4))
    *_, a, b = inputs(graph)
    first, second = graph.output_node().args[0]  # type: ignore[misc]
    write_back(graph, a, first, "copy_a")
    write_back(graph, b, second, "copy_b")
    assert reordered(graph, (1, 0)) == ["mm_1", "copy_b", "mm", "copy_a"]


def test_one_value_may_be_copied_into_two_inputs() -> None:
    """A light value that only copies need goes where they go, early."""

    def function(x: Tensor, y: Tensor, _a: Tensor, _b: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ y
        return (first @ y) @ y, first + 1

    graph = traced(function, *ones(4))
    *_, a, b = inputs(graph)
    result, value = graph.output_node().args[0]  # type: ignore[misc]
    write_back(graph, a, value, "copy_a")
    write_back(graph, b, value, "copy_b")
    graph.output_node().args = ((result,),)
    assert reordered(graph) == ["mm", "add", "copy_a", "copy_b", "mm_1", "mm_2"]


# Any graph


def _random_graph(rng: random.Random) -> Graph:
    """Matmuls, sums and views of two inputs and three memories, and a copy into each memory."""
    num_memories = 3

    def function(*args: Tensor) -> list[Tensor]:
        values = list(args)
        for _ in range(rng.randint(3, 12)):
            left, right = rng.choice(values), rng.choice(values)
            kind = rng.choice(["matmul", "add", "view", "scale"])
            values.append(
                {
                    "matmul": lambda a, b: a @ b / 2,
                    "add": lambda a, b: a + b,
                    "view": lambda a, _: a.view(4).view(2, 2),
                    "scale": lambda a, _: a * 0.5,
                }[kind](left, right)
            )
        return values[2 + num_memories :]

    args = ones(2 + num_memories)
    graph = traced(function, *args)
    values = [node for node in graph.nodes if node.op != "output"]
    returned = [node for node in values if base_of(node).op != "placeholder"]
    graph.output_node().args = (returned[-1:],)
    for memory in inputs(graph)[2:]:
        own = [node for node in values if _is_copied(node, inputs(graph)[2:])]
        write_back(graph, memory, rng.choice(own))
    return graph


def _is_copied(node: Node, memories: Sequence[Node]) -> bool:
    """Returns whether `node` may be copied into a memory: right shape, and no view of a memory."""
    return node.meta["val"].shape == SQUARE and base_of(node) not in memories


def _run(graph: Graph) -> tuple[list[Tensor], list[Tensor]]:
    noise = torch.Generator().manual_seed(0)
    args = [torch.randn(SQUARE, generator=noise) for _ in inputs(graph)]
    return GraphModule({}, graph)(*args), args


def _random_order(graph: Graph, rng: random.Random) -> list[int]:
    """Some order of the anchors that keeps what each needs before it."""
    anchors = [node for node in graph.nodes if is_anchor(node)]
    before = {node: _anchors_before(node) for node in anchors}
    order: list[int] = []
    done: set[Node] = set()
    while len(order) < len(anchors):
        ready = [i for i, a in enumerate(anchors) if a not in done and before[a] <= done]
        order.append(rng.choice(ready))
        done.add(anchors[order[-1]])
    return order


def _anchors_before(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        found |= {source} if is_anchor(source) else set()
        stack += source.all_input_nodes
    return found


@pytest.mark.parametrize("seed", range(40))
def test_any_graph_gives_and_remembers_the_same_in_another_order(seed: int) -> None:
    rng = random.Random(seed)
    graph = _random_graph(rng)
    given, remembered = _run(graph)
    reordered(graph, _random_order(graph, rng))
    again, also = _run(graph)
    for mine, other in zip((*again, *also), (*given, *remembered), strict=True):
        assert torch.equal(mine, other)
    assert sum(is_write_back(node) for node in graph.nodes) == 3
