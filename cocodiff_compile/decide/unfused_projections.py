# SPDX-License-Identifier: Apache-2.0
"""Decides whether Q, K and V get GEMMs of their own where one makes them together.

Where V's exchange cannot start early enough to matter, one large GEMM is as good.
"""

from __future__ import annotations

from torch.fx import Graph

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.choice import Choice
from cocodiff_compile.decide.limits import Limits, pays
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.ir.sketch import sketched
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.split_projections import fused_projections, split_projections
from cocodiff_compile.schedule.graph_tasks import step_seconds


def choose_unfused(
    graph: Graph, recognition: Recognition, costs: Costs, limits: Limits
) -> Choice[bool]:
    if not fused_projections(recognition):
        return Choice(False)
    sketch, sketch_found = sketched(graph, recognition)
    if not split_projections(sketch, sketch_found):
        return Choice(False)
    sketch.eliminate_dead_code()
    fused_s = step_seconds(graph, recognition, costs)
    unfused_s = step_seconds(sketch, recognize(sketch), costs)
    note = f"estimated {fused_s * 1e3:.1f} ms as captured, {unfused_s * 1e3:.1f} ms unfused"
    if not pays(fused_s, unfused_s, limits.unfused_gain):
        return Choice(False, (f"{note}: left fused",))
    return Choice(True, (note,))
