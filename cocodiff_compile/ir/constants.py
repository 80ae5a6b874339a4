# SPDX-License-Identifier: Apache-2.0
"""Says what a captured graph computes with besides its inputs: its pointwise ops, numbers of the
call, which Dynamo makes constants, and tensors that became part of the graph.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cocodiff_compile.ir.aten import aten
from cocodiff_compile.ir.pointwise import POINTWISE

_VALUES = POINTWISE | {aten.full.default, aten.full_like.default, aten.select.int}
"""The ops that are given whole numbers which are no sizes."""


def constants_of(module: GraphModule) -> dict[str, Any]:
    """Returns constants by what a message may call them. Sizes and dims do not count: they are
    numbers in one graph and symbols in another of the same model. Nor do tensors that were packed
    for a library, whose bytes differ from one packing to the next.
    """
    tensors: dict[str, Any] = {}
    numbers: dict[str, list[Any]] = {}
    ops: set[str] = set()
    _collect(module, tensors, numbers, ops)
    texts = {f"the numbers given to {op}": _text(values) for op, values in numbers.items()}
    return {**tensors, **texts, **{f"the op {op}": "computed" for op in sorted(ops)}}


def _collect(
    module: GraphModule, tensors: dict[str, Any], numbers: dict[str, list[Any]], ops: set[str]
) -> None:
    for node in module.graph.nodes:
        if node.target in POINTWISE:
            ops.add(str(node.target))
        if node.op == "get_attr":
            constant = getattr(module, str(node.target), None)
            if isinstance(constant, GraphModule):  # a branch, or the body of a loop
                _collect(constant, tensors, numbers, ops)
            elif isinstance(constant, torch.Tensor) and constant.layout is torch.strided:
                tensors[f"the constant {node.target}"] = constant
        elif node.op == "call_function":
            for number in _numbers(node):
                numbers.setdefault(str(node.target), []).append(number)


def _numbers(node: Node) -> Iterator[Any]:
    kinds = (bool, float, complex, int) if node.target in _VALUES else (bool, float, complex)
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, kinds):
            yield value


def _text(values: list[Any]) -> str:
    """Returns how often each value occurs, and a hash of their order."""
    order = hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    counts = ", ".join(f"{count} x {value!r}" for value, count in Counter(values).most_common(4))
    return f"{counts}, in the order {order}"
