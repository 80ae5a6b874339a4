# SPDX-License-Identifier: Apache-2.0
"""Graphs as text: a line per node, and what became of each line from one stage to the next."""

from __future__ import annotations

import operator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from cocodiff_compile.report.graph_text import (
    ADDED,
    KEPT,
    MOVED_AWAY,
    MOVED_HERE,
    REMOVED,
    Line,
    compared,
    lines_of,
    packed,
    stages_data,
    unpacked,
)

numbers = st.lists(st.integers(0, 30), unique=True)


@given(numbers, numbers)
def test_marks_tell_both_sides_and_keep_as_much_as_can_be(
    before: list[int], after: list[int]
) -> None:
    marked = compared(before, after)
    assert [n for mark, n in marked if mark in (KEPT, REMOVED, MOVED_AWAY)] == before
    assert [n for mark, n in marked if mark in (KEPT, ADDED, MOVED_HERE)] == after
    away = sorted(n for mark, n in marked if mark == MOVED_AWAY)
    assert away == sorted(n for mark, n in marked if mark == MOVED_HERE)
    assert not {n for mark, n in marked if mark == REMOVED} & set(after)
    assert not {n for mark, n in marked if mark == ADDED} & set(before)


@given(numbers)
def test_one_that_moved_is_all_that_is_marked(before: list[int]) -> None:
    after = before[1:] + before[:1]
    moved = sum(mark == MOVED_HERE for mark, _ in compared(before, after))
    assert moved == (1 if len(before) > 1 else 0)


def _graph() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, dtype=torch.bfloat16)
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, 1), {"alpha": 2})
    y.meta = {"val": x.meta["val"], "nn_module_stack": {"m": ("L['self'].blocks[0]", None)}}
    split = graph.call_function(torch.ops.aten.split.Tensor, (y, 1))
    split.meta["val"] = (y.meta["val"],)
    first = graph.call_function(operator.getitem, (split, 0))
    graph.output(([first], None))
    return graph


def test_a_line_says_what_a_node_makes_of_what() -> None:
    assert [line.text for line in lines_of(_graph())] == [
        "x: bf16[2, 3] = input",
        "add_tensor: bf16[2, 3] = aten.add.Tensor(x, 1, alpha=2)",
        "split_tensor: tuple = aten.split.Tensor(add_tensor, 1)",
        "getitem: ? = getitem(split_tensor, 0)",
        "return ([getitem], None)",
    ]
    assert [line.module for line in lines_of(_graph())] == ["", "blocks.0", "", "", ""]


def test_lines_are_packed_and_unpacked() -> None:
    lines = lines_of(_graph())
    assert unpacked(packed(lines)) == lines


def test_stages_hold_each_line_once() -> None:
    a, b, c = (Line(text, "m") for text in "abc")
    data = stages_data([("captured", [a, b]), ("one", [b, a, c]), ("two", [b, c])])
    assert data["text"] == ["a", "b", "c"]
    assert [stage["marks"].replace("=", "") for stage in data["stages"]] == ["", "<>+", "-"]
    assert [(s["added"], s["removed"], s["moved"]) for s in data["stages"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, 0),
    ]
