"""schedule-v-first: order a graph so that exchanges hide behind computation.

Needs     the graph as it will be compiled: chunks and phases are there. What ops and exchanges
          cost, the same on every rank.
Rewrites  the order of nodes, nothing else: starts come early, waits late, V's exchange before Q's
          and K's, independent work while exchanges are under way.
Keeps     every value, bit for bit, and the order of what has an effect beside its value.
Declines  nothing. Where the estimated gain is small the order stays as captured.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from cocodiff_compile.graph.pipeline import PassResult
from cocodiff_compile.graph.records import Recognition
from cocodiff_compile.schedule.costs import Costs
from cocodiff_compile.schedule.estimate import estimate_schedule
from cocodiff_compile.schedule.graph_tasks import graph_tasks, reorder

MIN_GAIN = 0.01
"""What an order must save of the estimated time before it is taken."""


@dataclass(frozen=True)
class ScheduleVFirst:
    costs: Costs
    name: str = "schedule-v-first"

    def run(self, graph: Graph, found: Recognition) -> PassResult:
        if not found.sites:
            return PassResult(changed=False)
        tasks = graph_tasks(graph, found, self.costs)
        estimate = estimate_schedule(tasks.tasks)
        before_ms, after_ms = estimate.before.step_s * 1e3, estimate.after.step_s * 1e3
        note = f"estimated {before_ms:.1f} ms as captured, {after_ms:.1f} ms in the new order"
        if estimate.gain < MIN_GAIN:
            return PassResult(False, notes=(f"{note}: left as captured",), estimate=estimate)
        reorder(graph, tasks.nodes, estimate.order)
        return PassResult(True, notes=(note,), estimate=estimate)
