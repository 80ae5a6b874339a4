# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes as arguments of calls: computed once, in front of the graph, from its inputs."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from cocodiff_compile.ir.aten import aten, emit
from cocodiff_compile.ir.size_nodes import SizeNodes
from tests.support.captured import capture


def _captured() -> GraphModule:
    (gm,) = capture(lambda x: (x * 2).relu(), torch.randn(3, 12), dynamic=True)
    return gm


def test_a_number_is_itself() -> None:
    assert SizeNodes(_captured().graph).argument(5) == 5


def test_a_size_is_computed_once_and_before_all_calls() -> None:
    gm = _captured()
    (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    rows, columns = relu.meta["val"].shape
    sizes = SizeNodes(gm.graph)
    shape = [sizes.argument(rows * columns // 6), sizes.argument(rows * 0 + 6)]
    assert shape[1] == 6
    assert sizes.argument(rows * columns // 6) is shape[0]
    with gm.graph.inserting_after(relu):
        flat = emit(gm.graph, aten.reshape.default, relu, shape, like=relu)
    relu.replace_all_uses_with(flat, delete_user_cb=lambda user: user is not flat)
    gm.graph.lint()
    gm.recompile()
    for given in ((3, 12), (4, 9)):
        values = torch.arange(float(given[0] * given[1])).reshape(given)
        inputs = [
            values if isinstance(node.meta["val"], torch.Tensor) else None
            for node in gm.graph.find_nodes(op="placeholder")
        ]
        numbers = iter(given)
        (found,) = gm(*(next(numbers) if item is None else item for item in inputs))
        assert torch.equal(found, (values * 2).reshape(-1, 6))
