# SPDX-License-Identifier: Apache-2.0
"""Makes Inductor keep the order of a graph: it fuses and reorders in its own order otherwise.

Runs as Inductor's last pass over the graph. What has a place of its own in a schedule is made to
depend on what stands before it, wherever the data do not say so already. A function of the graph
alone, which is part of the key of Inductor's code cache: code from there has the order too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from cocodiff_compile import compat
from cocodiff_compile.compat import (
    CustomGraphPass,
    get_hash_for_files,
    inductor_settings,
    order_nodes,
)
from cocodiff_compile.ir import aten, attention_ops, collectives
from cocodiff_compile.ir.collectives import is_collective, is_wait
from cocodiff_compile.say_once import say_once
from cocodiff_compile.schedule import graph_tasks
from cocodiff_compile.schedule.graph_tasks import has_other_effect, is_anchor

log = logging.getLogger(__name__)


class PinOrder(CustomGraphPass):
    """Keeps exchanges and waits where they stand among matmuls and attentions. Only what reads what
    was waited for follows a wait: a wait may come later, never earlier.
    """

    def __call__(self, graph: Graph) -> None:
        if not order_nodes(graph, dict(pins(graph))):
            say_once(
                log,
                logging.WARNING,
                "this version of torch cannot enforce an order: Inductor orders the exchanges "
                "in its own way, results are the same",
            )

    def uuid(self) -> Any:
        used = (aten, attention_ops, collectives, compat, graph_tasks)
        files = get_hash_for_files((__file__, *(str(module.__file__) for module in used)))
        return files, attention_ops.registry_text()


def pins(graph: Graph) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Yields (anchor, the anchors it must follow) where its own data do not make it follow.

    An exchange, and a wait, follows all that stands before it; what stands behind an exchange
    follows that. What has another effect follows the last one that has. All else that lies between
    two exchanges may change places: Inductor fuses less around every node that is pinned.
    """
    start: Node | None = None
    follows: dict[Node, Node | None] = {}
    """The exchange that a node follows by its data or by a pin, if that is the last one."""
    between: list[Node] = []
    effect: Node | None = None
    for node in graph.nodes:
        is_behind = start is not None and any(
            follows.get(source) is start for source in node.all_input_nodes
        )
        follows[node] = start if is_behind else None
        if not is_anchor(node):
            continue
        before: list[Node] = []
        if is_collective(node) or is_wait(node):
            before = _not_implied(node, between, start)
        if start is not None and not is_behind and not before:
            before = [start]
        if has_other_effect(node):
            before += [effect] if effect is not None else []
            effect = node
        if before:
            yield node, before
        if is_collective(node):
            start, between = node, []
        elif not is_wait(node):
            between.append(node)
        follows[node] = start


def _not_implied(node: Node, between: Sequence[Node], start: Node | None) -> list[Node]:
    """Returns the anchors of `between` that neither data nor each other make `node` follow."""
    seen: set[Node] = set()
    found = []
    _add_sources(node, start, seen)
    for anchor in reversed(between):
        if anchor not in seen:
            found.append(anchor)
            _add_sources(anchor, start, seen)
    return found


def _add_sources(node: Node, start: Node | None, seen: set[Node]) -> None:
    """Adds all that the data of a node come from, as far back as the last exchange."""
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen and (start is None or source > start):
                seen.add(source)
                stack.append(source)


def pinned() -> Any:
    """Returns the settings under which Inductor keeps the order of a graph."""
    return inductor_settings(
        {
            "post_grad_custom_post_pass": PinOrder(),
            "reorder_for_locality": False,
            "reorder_for_peak_memory": False,
        }
    )
