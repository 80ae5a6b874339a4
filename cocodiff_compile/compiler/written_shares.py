"""Refuses blocks that write to a share they are given.

The caller of a block would see what it writes to its input. Where the input is a share, the block
writes to a copy that was gathered, which nobody else sees. In Dynamo's graph such writes still
stand as the model has them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from cocodiff_compile.errors import UserError
from cocodiff_compile.shard.token_share import TokenShare

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_WRITING = {operator.setitem, *(getattr(operator, f"i{name}") for name in _IN_PLACE)}
_VIEWS = """
    chunk detach diagonal expand expand_as flatten movedim narrow permute reshape select split
    squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view
    view_as
""".split()  # noqa: SIM905  (a list of strings would take a line each)


def refuse_written_shares(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Raises UserError if a graph of Dynamo writes to an input that is a share, or to a view of
    it.
    """
    places = gm.graph.find_nodes(op="placeholder")
    views = {
        node for node, value in zip(places, inputs, strict=True) if isinstance(value, TokenShare)
    }
    if not views:
        return
    for node in gm.graph.nodes:
        first = node.args[0] if node.args else None
        targets = [item for item in (first, node.kwargs.get("out")) if item in views]
        if targets and _writes(node):
            raise UserError(
                "option 'shard': a compiled block writes to its input in place, of which each rank "
                "holds a share only; write x = x + y instead of x += y, or compile the model as a "
                "whole"
            )
        if first in views and _is_view(node):
            views.add(node)


def _writes(node: Node) -> bool:
    name = _name(node)
    return (
        node.target in _WRITING
        or "out" in node.kwargs
        or bool(node.kwargs.get("inplace"))
        or (name.endswith("_") and not name.endswith("__"))
    )


def _is_view(node: Node) -> bool:
    return node.target is operator.getitem or _name(node) in _VIEWS


def _name(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")
