# SPDX-License-Identifier: Apache-2.0
"""Rows that were selected, followed through a graph: values of the rest are never looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.cut.selected_rows import (
    SelectedRows,
    multiply_rows,
    plan_selection,
    take_rows,
)
from cocodiff_compile.ir.aten import aten, emit, matmul_operands

pytestmark = pytest.mark.usefixtures("without_gradients")

BATCH, TOKENS, SIZE = 2, 4, 8
SELECTED = {"first": (1, 3), "second": (0, 2)}
"""Tokens that were selected of each of two streams of the same length, in their order."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def projected(first: Tensor, second: Tensor, weight: Tensor, way: Way, table: Tensor) -> Tensor:
    flat = [item.reshape(BATCH * TOKENS, SIZE) for item in (first, second)]
    return way(torch.mm(flat[0], weight), torch.mm(flat[1], weight * 2), table)


def by_token(flat: Tensor) -> Tensor:
    return flat.reshape(BATCH, TOKENS, SIZE)


def joined(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    rows = torch.cat([by_token(a), by_token(b)], 1)
    return (rows * table[None]).reshape(BATCH, 2 * TOKENS, 2, SIZE // 2).permute(2, 1, 0, 3)


def joined_the_other_way(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    return joined(b, a, table)


def rotated_apart(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    """Each stream by its own part of a table, halves swapped, before they are joined."""
    rows = []
    for item, part in ((a, table[:TOKENS]), (b, table[TOKENS:])):
        low, high = (by_token(item) * part).chunk(2, -1)
        rows.append(torch.cat([-high, low], -1) + by_token(item).mean(-1, keepdim=True))
    return torch.cat(rows, 1)


WAYS: dict[str, tuple[Way, tuple[str, str]]] = {
    "joined": (joined, ("first", "second")),
    "joined the other way": (joined_the_other_way, ("second", "first")),
    "rotated apart": (rotated_apart, ("first", "second")),
}
"""Ways to join two streams, and the order in which the streams lie."""


def inputs() -> tuple[Tensor, ...]:
    """Every row another one."""
    rows = torch.randn(2, BATCH, TOKENS, SIZE, generator=torch.Generator().manual_seed(1))
    table = torch.randn(2 * TOKENS, SIZE, generator=torch.Generator().manual_seed(2))
    return rows[0], rows[1], torch.eye(SIZE) + 0.1, table


def captured(way: Way) -> GraphModule:
    def call(first: Tensor, second: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        return projected(first, second, weight, way, table)

    return make_fx(call, tracing_mode="fake")(*inputs())


def cut_into_selected() -> Cut:
    count = len(SELECTED["first"])
    return Cut(0, BATCH, (count, TOKENS - count), selected=count)


def begins(graph: Graph) -> dict[str, Node]:
    nodes = graph.find_nodes(op="call_function", target=aten.mm.default)
    return dict(zip(("first", "second"), nodes, strict=True))


def with_selected_rows(gm: GraphModule, order: tuple[str, str]) -> GraphModule:
    """Returns a module that computes its result for selected rows; which ones, it takes last."""
    graph = gm.graph
    (output,) = graph.output_node().all_input_nodes
    begin = begins(graph)
    plan = plan_selection(dict.fromkeys(begin.values(), cut_into_selected()), output)
    assert plan.streams == tuple(begin[name] for name in order)
    assert plan.stream_rows == (TOKENS, TOKENS)
    which = {name: new_index(graph, name, len(rows), output) for name, rows in SELECTED.items()}
    everyones = new_index(graph, "both", sum(map(len, SELECTED.values())), output)
    with graph.inserting_before(graph.output_node()):
        given = {}
        for name, node in begin.items():
            left, _ = matmul_operands(node)
            rows = take_rows(graph, left, cut_into_selected(), which[name])
            given[node] = multiply_rows(graph, node, rows)
        at: dict[Node | None, Node] = {begin[name]: which[name] for name in begin}
        rows = SelectedRows(graph, plan.rows.steps, which={**at, None: everyones})
        graph.output_node().replace_input_with(output, rows.emit_plan(plan, given))
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(gm, graph)


def new_index(graph: Graph, name: str, count: int, like: Node) -> Node:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(f"rows_{name}")
    with like.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(count, dtype=torch.int64)
    return node


@pytest.mark.parametrize("name", WAYS)
def test_selected_rows_are_those_of_all_rows(name: str) -> None:
    way, order = WAYS[name]
    whole = projected(*inputs()[:3], way, inputs()[3])
    both = [SELECTED[order[0]], tuple(TOKENS + row for row in SELECTED[order[1]])]
    everyones = torch.tensor([row for rows in both for row in rows])
    index = [torch.tensor(SELECTED["first"]), torch.tensor(SELECTED["second"]), everyones]
    found = with_selected_rows(captured(way), order)(*inputs(), *index)
    torch.testing.assert_close(found, whole.index_select(1, everyones))


@pytest.mark.parametrize("name", WAYS)
def test_no_node_computes_a_row_that_was_not_selected(name: str) -> None:
    way, order = WAYS[name]
    gm = with_selected_rows(captured(way), order)
    products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [node.meta["val"].shape[0] for node in products] == [BATCH * 2] * 2
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(item in products for item in node.all_input_nodes):
            assert node.meta["val"].numel() <= BATCH * 4 * SIZE


def sums_over_rows(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    return joined(a, b, table).sum(1)


def takes_some_rows(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    return joined(a, b, table)[:, 1:]


def adds_streams(a: Tensor, b: Tensor, _table: Tensor) -> Tensor:
    return by_token(a) + by_token(b)


def joins_other_rows(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    rows = torch.cat([by_token(a), by_token(b)], 1)
    return torch.cat([rows, table.expand(BATCH, -1, -1)], 1)


def norms_windows(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    """Centres windows of four rows each, which rows that are selected one by one do not form."""
    windows = torch.cat([by_token(a), by_token(b)], 1).reshape(BATCH, 2, TOKENS, SIZE)
    return (windows - windows.mean(2, keepdim=True)).reshape(BATCH, 2 * TOKENS, SIZE) * table


def joins_beside(a: Tensor, b: Tensor, _table: Tensor) -> Tensor:
    return torch.cat([by_token(a), by_token(b)], 2)


def adds_to_joined(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    return joined(a, b, table) + by_token(a).sum() * 0


MIXING = [
    *(sums_over_rows, takes_some_rows, adds_streams, joins_other_rows),
    *(norms_windows, joins_beside, adds_to_joined),
]


@pytest.mark.parametrize("way", MIXING)
def test_what_mixes_rows_is_refused(way: Way) -> None:
    graph = captured(way).graph
    (output,) = graph.output_node().all_input_nodes
    with pytest.raises(CutUnknown):
        plan_selection(dict.fromkeys(begins(graph).values(), cut_into_selected()), output)


def test_what_has_none_of_the_rows_is_refused() -> None:
    graph = captured(joined).graph
    begin = begins(graph)
    with pytest.raises(CutUnknown, match="has none of the rows"):
        plan_selection({begin["second"]: cut_into_selected()}, begin["first"])


def test_rows_of_an_operand_are_read_only_where_it_is_known_which() -> None:
    gm = captured(joined)
    (output,) = gm.graph.output_node().all_input_nodes
    begin = begins(gm.graph)
    plan = plan_selection(dict.fromkeys(begin.values(), cut_into_selected()), output)
    with gm.graph.inserting_before(gm.graph.output_node()):
        given: dict[Node, Any] = {
            node: emit(gm.graph, aten.slice.Tensor, node, 0, 0, 2 * BATCH, like=node)
            for node in begin.values()
        }
        with pytest.raises(CutUnknown, match=r"which rows of .* were selected is unclear"):
            SelectedRows(gm.graph, plan.rows.steps).emit_plan(plan, given)
