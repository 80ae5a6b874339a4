# SPDX-License-Identifier: Apache-2.0
"""schedule-v-first: order a graph so that exchanges hide behind computation.

Needs     the graph as it will be compiled: chunks and phases are there. The order of its matmuls,
          attentions, collectives and waits, as places in the order of the graph.
Rewrites  the order of nodes, nothing else: starts come early, waits late, V's exchange before Q's
          and K's, independent work while exchanges are under way.
Keeps     every value, bit for bit, and the order of what has an effect beside its value.
Declines  nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.schedule.graph_tasks import is_anchor, node_order, reorder


@dataclass(frozen=True)
class ScheduleVFirst:
    """`order` is a permutation of the places of all nodes that `is_anchor` holds for."""

    order: tuple[int, ...]
    name: str = "schedule-v-first"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:  # noqa: ARG002
        anchors = [node for node in graph.nodes if is_anchor(node)]
        if sorted(self.order) != list(range(len(anchors))):
            raise UserError(
                f"an order of {len(self.order)} steps is given for a graph of {len(anchors)}: "
                "option 'decision' was made for another graph; save the decisions again"
            )
        reorder(graph, node_order(graph, anchors, self.order))
        return PassResult(changed=True)
