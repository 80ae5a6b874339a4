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
from cocodiff_compile.ir.collectives import is_wait
from cocodiff_compile.say_once import say_once
from cocodiff_compile.schedule import graph_tasks
from cocodiff_compile.schedule.graph_tasks import is_anchor

log = logging.getLogger(__name__)


class PinOrder(CustomGraphPass):
    """Makes each anchor follow the one before it. Only what reads what was waited for follows a
    wait: a wait may come later, never earlier.
    """

    def __call__(self, graph: Graph) -> None:
        if not order_nodes(graph, dict(pins(graph))):
            say_once(
                log,
                logging.WARNING,
                "this version of torch cannot be told an order: Inductor orders the exchanges "
                "in its own way, results are the same",
            )

    def uuid(self) -> Any:
        used = (aten, attention_ops, collectives, compat, graph_tasks)
        files = get_hash_for_files((__file__, *(str(module.__file__) for module in used)))
        return files, attention_ops.registry_text()


def pins(graph: Graph) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Yields (anchor, the anchors it must follow) where its own data do not make it follow."""
    last: Node | None = None
    for node in graph.nodes:
        if not is_anchor(node):
            continue
        if last is not None and not _is_fed_by(node, last):
            yield node, (last,)
        if not is_wait(node):
            last = node


def _is_fed_by(node: Node, anchor: Node) -> bool:
    """Returns whether data flow from `anchor` to `node` with no anchor between them but waits."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source is anchor:
                return True
            passes = source.op == "call_function" and (not is_anchor(source) or is_wait(source))
            if passes and source > anchor and source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def pinned() -> Any:
    """Returns the settings under which Inductor keeps the order of a graph."""
    return inductor_settings(
        {
            "post_grad_custom_post_pass": PinOrder(),
            "reorder_for_locality": False,
            "reorder_for_peak_memory": False,
        }
    )
