# SPDX-License-Identifier: Apache-2.0
"""Decides on an order of the graph that hides exchanges behind computation."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.schedule.estimate import ScheduleEstimate, estimate_schedule
from cocodiff_compile.schedule.graph_tasks import graph_tasks, node_order
from cocodiff_compile.schedule.peak_memory import peak_bytes


@dataclass(frozen=True)
class OrderChoice:
    """`order` is None where the graph stays as captured."""

    order: tuple[int, ...] | None
    note: str
    estimate: ScheduleEstimate


def choose_order(
    graph: Graph, recognition: Recognition, costs: Costs, limits: Limits
) -> OrderChoice:
    """Takes the scheduled order, unless it gains little or would keep much more memory alive."""
    tasks = graph_tasks(graph, recognition, costs)
    estimate = estimate_schedule(tasks.tasks)
    before_ms, after_ms = (
        order.timeline.step_s * 1e3 for order in (estimate.before, estimate.after)
    )
    note = f"estimated {before_ms:.1f} ms as captured, {after_ms:.1f} ms in the new order"
    if estimate.gain < limits.order_gain:
        return OrderChoice(None, f"{note}: left as captured", estimate)
    ordered = node_order(graph, tasks.nodes, estimate.order)
    memory = peak_bytes(ordered) / max(1, peak_bytes(list(graph.nodes)))
    if memory > limits.order_memory:
        note = f"{note}, which takes {memory:.2f} times the memory: left as captured"
        return OrderChoice(None, note, estimate)
    return OrderChoice(estimate.order, f"{note}, {memory:.2f} times the memory", estimate)
