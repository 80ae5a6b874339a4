# SPDX-License-Identifier: Apache-2.0
"""Reads off generated code whether it keeps the order of its graph.

Only what code generation leaves recognisable is compared: collectives, waits and attentions, and
matmuls where all of them became calls of a library.
"""

from __future__ import annotations

import re

from torch._ops import OpOverload
from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import is_heavy
from cocodiff_compile.ir.attention_ops import is_attention, is_attention_call
from cocodiff_compile.ir.collectives import is_collective, is_wait
from cocodiff_compile.schedule.graph_tasks import is_anchor

_MATMUL, _ATTENTION, _WAIT = "matmul", "attention", "wait"

_CALLS = re.compile(
    r"extern_kernels\.(?P<matmul>mm|addmm|bmm|baddbmm|_int_mm|_scaled_mm|convolution)\("
    r"|_c10d_functional\.(?P<collective>\w+?)_?\.default\("
    r"|torch\.ops\.(?!_c10d_functional)(?P<op>\w+\.\w+\.\w+)\("
)


def graph_kinds(graph: Graph) -> list[str]:
    """Returns the kinds of the anchors of a graph, in its order."""
    return [_kind(node) for node in graph.nodes if is_anchor(node)]


def _kind(node: Node) -> str:
    if is_wait(node):
        return _WAIT
    if is_collective(node):
        return _collective(str(node.target).split(".")[1])
    if is_attention(node.target):
        # Higher-order ones are generated as kernels, under names that are not known here.
        return _ATTENTION if isinstance(node.target, OpOverload) else "effect"
    return _MATMUL if is_heavy(node) else "effect"


def _collective(name: str) -> str:
    return _WAIT if name in ("wait_tensor", "wait_tensors") else name.removesuffix("_out")


def code_kinds(code: str) -> list[str]:
    """Returns the kinds of the calls in Inductor's wrapper code, in its order."""
    body = code[code.index("def call(") :] if "def call(" in code else ""
    found = []
    for line in body.splitlines():
        call = None if line.lstrip().startswith("#") else _CALLS.search(line)
        if call is None:
            continue
        if call["collective"]:
            found.append(_collective(call["collective"]))
        elif call["matmul"]:
            found.append(_MATMUL)
        elif is_attention_call(call["op"]):
            found.append(_ATTENTION)
    return found


def keeps_order(code: str, kinds: list[str]) -> bool | None:
    """Returns whether `code` runs its calls in the order of `kinds`; None if it does not show."""
    generated = code_kinds(code)
    compared = {_WAIT, _ATTENTION, _MATMUL} | {kind for kind in kinds if "all_" in kind}
    if generated.count(_MATMUL) != kinds.count(_MATMUL):
        compared.discard(_MATMUL)
    left = [kind for kind in generated if kind in compared]
    right = [kind for kind in kinds if kind in compared]
    if sorted(left) != sorted(right):
        return None
    return left == right
