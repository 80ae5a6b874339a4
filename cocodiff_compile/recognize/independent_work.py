# SPDX-License-Identifier: Apache-2.0
"""Finds the work that the exchanges of a Ulysses attention could overlap with: work of the same
section of the graph that neither feeds the attention nor needs its result.

The section of a site begins after the output exchange of the preceding site and ends at the first
input exchange of the following one, so that all sections together are at most twice the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import is_heavy
from cocodiff_compile.ir.records import UlyssesSite


def with_independent_work(graph: Graph, sites: Sequence[UlyssesSite]) -> tuple[UlyssesSite, ...]:
    """Returns the same sites, each with its independent matmuls and attentions in graph order."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    filled = []
    for number, site in enumerate(sites):
        begin = position[sites[number - 1].o.exchange.wait] + 1 if number else 0
        end = len(nodes)
        if number + 1 < len(sites):
            following = sites[number + 1]
            end = min(position[leg.exchange.start] for leg in following.legs[:3])
        filled.append(replace(site, independent=_independent(nodes[begin:end], site)))
    return tuple(filled)


def _independent(stretch: list[Node], site: UlyssesSite) -> tuple[Node, ...]:
    own = set(site.attention.nodes)
    feeding = set(own)
    for node in reversed(stretch):
        if node in feeding or any(user in feeding for user in node.users):
            feeding.add(node)
    needing = set(own)
    for node in stretch:
        if any(before in needing for before in node.all_input_nodes):
            needing.add(node)
    return tuple(
        node for node in stretch if is_heavy(node) and node not in feeding and node not in needing
    )
