# SPDX-License-Identifier: Apache-2.0
"""Estimates how much memory a graph takes in a given order of its nodes: weights and other inputs,
which are there all the time, and values. What Inductor fuses away is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from cocodiff_compile.cost.ops import hinted_bytes, is_kept
from cocodiff_compile.ir.aten import WAIT, is_alias


def peak_bytes(nodes: Sequence[Node]) -> int:
    """Returns the most bytes that are alive at one time; a value lives until the last node that
    reads it or a view of it, inputs live to the end.
    """
    owner: dict[Node, Node] = {}
    last_use: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        shows = node.op == "call_function" and (is_alias(node) or node.target is WAIT)
        owner[node] = owner[node.all_input_nodes[0]] if shows and node.all_input_nodes else node
        for source in node.all_input_nodes:
            last_use[owner[source]] = place
    dying: dict[int, list[Node]] = {}
    for node, place in last_use.items():
        dying.setdefault(place, []).append(node)
    alive = peak = sum(hinted_bytes(node) for node in nodes if node.op == "placeholder")
    for place, node in enumerate(nodes):
        alive += _own_bytes(node, owner)
        peak = max(peak, alive)
        alive -= sum(_own_bytes(done, owner) for done in dying.get(place, ()))
    return peak


def _own_bytes(node: Node, owner: dict[Node, Node]) -> int:
    if node.op != "call_function" or owner[node] is not node or not is_kept(node):
        return 0
    return hinted_bytes(node)
