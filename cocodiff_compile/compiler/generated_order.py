"""Reads off generated code whether it keeps the order of its graph.

Only what code generation leaves recognisable is compared: collectives, waits and attentions, and
matmuls where all of them became calls of a library.
"""

from __future__ import annotations

import re

from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import WAIT, is_heavy
from cocodiff_compile.ir.attention_ops import ATTENTION_OPS, FUSED_ATTENTION
from cocodiff_compile.ir.collectives import is_collective
from cocodiff_compile.schedule.graph_tasks import is_anchor

_MATMUL, _ATTENTION, _WAIT = "matmul", "attention", "wait"

_CALLS = re.compile(
    r"extern_kernels\.(?P<matmul>mm|addmm|bmm|baddbmm|convolution)\("
    rf"|(?P<attention>{'|'.join(sorted(re.escape(str(op)) for op in FUSED_ATTENTION))})\("
    r"|_c10d_functional\.(?P<collective>\w+?)_?\.default\("
)


def graph_kinds(graph: Graph) -> list[str]:
    """Returns the kinds of the anchors of a graph, in its order."""
    return [_kind(node) for node in graph.nodes if is_anchor(node)]


def _kind(node: Node) -> str:
    if node.target is WAIT:
        return _WAIT
    if is_collective(node):
        return _collective(str(node.target).split(".")[1])
    if node.target in FUSED_ATTENTION:
        return _ATTENTION
    if node.target in ATTENTION_OPS:
        return "effect"  # generated as a kernel, under a name that is not known here
    return _MATMUL if is_heavy(node) else "effect"


def _collective(name: str) -> str:
    return _WAIT if name == "wait_tensor" else name.removesuffix("_out")


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
        else:
            found.append(_MATMUL if call["matmul"] else _ATTENTION)
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
