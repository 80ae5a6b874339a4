# SPDX-License-Identifier: Apache-2.0
"""walk: where walks end, what they pass by, and what is cut out on a path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cocodiff_compile.recognize import walk
from cocodiff_compile.recognize.walk import Cut, between, trace_root, walk_back, walk_forward
from tests.support.traced import inputs, result, traced


def _chain(x: Tensor) -> Tensor:
    for _ in range(40):
        x = x.relu()
    return x


@pytest.mark.parametrize(("limit", "reached"), [(10, 0), (30, 0), (100, 1)])
def test_walks_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: int, reached: int) -> None:
    graph = traced(_chain, torch.ones(3))
    monkeypatch.setattr(walk, "MAX_NODES_PER_WALK", limit)
    begin, end = inputs(graph)[0], result(graph)
    assert len(walk_back(end)) == reached
    assert len(walk_forward(begin)) == reached
    assert len(between(begin, end)) == (40 if reached else 0)


def _sized_by_another(x: Tensor, other: Tensor) -> Tensor:
    return x.expand(other.shape[0], x.shape[1]).relu()


def test_sizes_are_not_walked_through() -> None:
    graph = traced(_sized_by_another, torch.ones(1, 4), torch.ones(3, 5), sizes="symbolic")
    x, other = inputs(graph)
    assert other.users, "its size is read"
    assert [route.barrier for route in walk_back(result(graph))] == [x]
    assert graph.output_node() in [route.barrier for route in walk_forward(x)]


def test_a_tensor_of_which_only_the_size_is_read_reaches_nothing() -> None:
    graph = traced(_sized_by_another, torch.ones(1, 4), torch.ones(3, 5), sizes="symbolic")
    assert walk_forward(inputs(graph)[1]) == []


def test_a_walk_ends_at_the_first_matmul() -> None:
    graph = traced(lambda x, y: ((x @ y).relu() @ y).relu(), torch.ones(4, 4), torch.ones(4, 4))
    first, second = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert [route.barrier for route in walk_back(result(graph))] == [second]
    assert [route.barrier for route in walk_forward(first)] == [second]


def _nested(x: Tensor) -> Tensor:
    return x.split([4, 12], dim=1)[1].chunk(3, dim=1)[1].relu()


def _of_heads(x: Tensor) -> Tensor:
    return x.view(4, 4, 4)[..., 2:].relu()


def _whole_heads(x: Tensor) -> Tensor:
    return x.view(4, 4, 4)[:, 1:3].relu()


CUTS: list[tuple[str, Callable[[Tensor], Tensor], tuple[Cut, ...]]] = [
    ("a split of a split", _nested, (Cut(1, 4, 12), Cut(1, 8, 4))),
    ("a slice of heads", _whole_heads, (Cut(1, 4, 8),)),
    ("a slice of rows", lambda x: x[1:3].relu(), (Cut(0, 1, 2),)),
    ("a part of every head", _of_heads, ()),
    ("all of it", lambda x: x[:, 0:16].chunk(1, dim=1)[0].relu(), ()),
]


@pytest.mark.parametrize(
    ("function", "cuts"), [item[1:] for item in CUTS], ids=[item[0] for item in CUTS]
)
def test_cuts_are_counted_in_columns_of_the_root(
    function: Callable[[Tensor], Tensor], cuts: tuple[Cut, ...]
) -> None:
    (route,) = walk_back(result(traced(function, torch.ones(4, 16))))
    found = trace_root(route.path)
    assert (found.cuts, found.stopped_by) == (cuts, "")


def test_a_slice_with_a_step_ends_a_trace() -> None:
    graph = traced(lambda x: x[:, ::2].relu(), torch.ones(4, 16))
    (route,) = walk_back(result(graph))
    found = trace_root(route.path)
    assert (found.cuts, found.node) == ((), inputs(graph)[0])
    assert "no consecutive part" in found.stopped_by
