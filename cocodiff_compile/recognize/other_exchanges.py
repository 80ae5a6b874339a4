# SPDX-License-Identifier: Apache-2.0
"""Declines all-to-alls that recognition does not support: ops other than `all_to_all_single`, and
those inside of a branch or a loop. None of them can be part of a site.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.ir.aten import ALL_TO_ALL
from cocodiff_compile.ir.collectives import is_all_to_all, parse_all_to_all
from cocodiff_compile.ir.module_path import module_path_of
from cocodiff_compile.ir.records import Declined


def decline_other_exchanges(graph: Graph) -> list[Declined]:
    """Returns a decline for each of them, in graph order."""
    declined = []
    for node in graph.nodes:
        if reason := _reason(node):
            declined.append(Declined(node, reason, module_path_of([node])))
    return declined


def _reason(node: Node) -> str:
    if is_all_to_all(node):
        if node.target is not ALL_TO_ALL:
            return (
                f"{node.target} is an all-to-all that this pass does not support; use "
                "torch.distributed.all_to_all_single, or its functional form"
            )
        return "" if parse_all_to_all(node) else f"nothing waits for {node.name}"
    inside = next(_all_to_alls_inside(node), None)
    if inside is None:
        return ""
    return (
        f"{inside.target} ({inside.name}) lies inside of {node.target} ({node.name}), whose "
        "branches and loops this pass does not support; exchange outside of it"
    )


def _all_to_alls_inside(node: Node) -> Iterator[Node]:
    """Yields the all-to-alls of the graphs that a higher-order op such as `cond` calls."""
    for module in _called_graphs(node):
        for inner in module.graph.nodes:
            if is_all_to_all(inner):
                yield inner
            yield from _all_to_alls_inside(inner)


def _called_graphs(node: Node) -> Iterator[GraphModule]:
    owner = node.graph.owning_module
    if node.op != "call_function" or owner is None:
        return
    for source in node.all_input_nodes:
        module = getattr(owner, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(module, GraphModule):
            yield module
