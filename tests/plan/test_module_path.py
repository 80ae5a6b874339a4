# SPDX-License-Identifier: Apache-2.0
"""Module paths: Dynamo's names without what hooks and wrappers leave in them."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from cocodiff_compile.ir.module_path import module_path_of

HOOKED = "L['function_reference'].forward.__self__.__dict__['_modules']['blocks'].0"
WRAPPED = ".forward.func.__closure__[0].cell_contents.forward.__self__"


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (["L['self'].blocks.0.attn.to_q"], "blocks.0.attn.to_q"),
        (["L['self'].blocks.0.attn.to_q", "L['self'].blocks.0.attn.to_k"], "blocks.0.attn"),
        ([f"{HOOKED}.attn1.to_v"], "blocks.0.attn1.to_v"),
        ([f"{HOOKED}{WRAPPED}{WRAPPED}.attn1.to_v"], "blocks.0.attn1.to_v"),
        (["L['function_reference'].forward.args[0].__dict__['_modules']['blocks'].1"], "blocks.1"),
        (["L['self']._modules['blocks']._modules['0']._orig_mod.attn"], "blocks.0.attn"),
        (["L['self'].blocks.0.q", "L['self'].other.0.q"], ""),
        ([], ""),
    ],
)
def test_the_deepest_common_module(names: list[str], path: str) -> None:
    graph = Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(names))]
    for node, name in zip(nodes, names, strict=True):
        node.meta["nn_module_stack"] = {"key": (name, object)}
    assert module_path_of(nodes) == path
