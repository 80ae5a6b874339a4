"""schedule-v-first: order a graph so that exchanges hide behind computation.

Needs     the graph as it will be compiled: chunks and phases are there. What ops and exchanges
          cost, the same on every rank.
Rewrites  the order of nodes, nothing else: starts come early, waits late, V's exchange before Q's
          and K's, independent work while exchanges are under way.
Keeps     every value, bit for bit, and the order of what has an effect beside its value.
Declines  nothing. The order stays as captured where the estimated gain is small, or where the new
          one would keep much more memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.pipeline.graph_pass import PassResult
from cocodiff_compile.schedule.estimate import estimate_schedule
from cocodiff_compile.schedule.graph_tasks import graph_tasks, reorder
from cocodiff_compile.schedule.peak_memory import peak_bytes

MIN_GAIN = 0.01
"""What an order must save of the estimated time before it is taken."""
MAX_MEMORY = 1.15
"""How many times the memory of the captured order another one may take."""


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
        captured = list(graph.nodes)
        reorder(graph, tasks.nodes, estimate.order)
        memory = peak_bytes(list(graph.nodes)) / max(1, peak_bytes(captured))
        if memory > MAX_MEMORY:
            for node in captured[:-1]:
                captured[-1].prepend(node)
            note = f"{note}, which takes {memory:.2f} times the memory: left as captured"
            return PassResult(False, notes=(note,), estimate=estimate)
        return PassResult(
            True, notes=(f"{note}, {memory:.2f} times the memory",), estimate=estimate
        )
