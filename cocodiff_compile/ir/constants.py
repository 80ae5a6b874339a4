# SPDX-License-Identifier: Apache-2.0
"""Says what a captured graph computes with besides its inputs: numbers of the call, which Dynamo
makes constants, and tensors that became part of the graph.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from cocodiff_compile.ir.pointwise import POINTWISE


def constants_of(module: GraphModule) -> dict[str, Any]:
    """Returns constants by what a message may call them. Sizes and dims do not count: they are
    numbers in one graph and symbols in another of the same model.
    """
    numbers: dict[str, list[Any]] = {}
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            found[f"the constant {node.target}"] = getattr(module, str(node.target))
        elif node.op == "call_function":
            numbers.setdefault(str(node.target), []).extend(_numbers(node))
    for op, values in numbers.items():
        if values:
            found[f"the numbers given to {op}"] = _text(values)
    return found


def _numbers(node: Node) -> Iterator[Any]:
    kinds = (bool, float, complex, str, int) if node.target in POINTWISE else (bool, float, complex)
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, kinds):
            yield value


def _text(values: list[Any]) -> str:
    """Returns how often each value occurs, and a hash of their order."""
    order = hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    counts = ", ".join(f"{count} x {value!r}" for value, count in Counter(values).most_common(4))
    return f"{counts}, in the order {order}"
