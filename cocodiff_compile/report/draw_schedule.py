"""Draws the estimated timeline of a step, before and after it was ordered, as a picture or a trace.

The picture shows one attention in the middle of the program, from its first exchange to its last,
as captured above and as ordered below. The trace (`.json`, for https://ui.perfetto.dev) holds the
whole step.
"""

from __future__ import annotations

import json
from pathlib import Path

from cocodiff_compile.cost.clock import Span
from cocodiff_compile.cost.tasks import NO_SITE, Task
from cocodiff_compile.errors import UserError
from cocodiff_compile.report.chrome_trace import ChromeTrace, TraceSpan
from cocodiff_compile.report.lane_charts import LaneChart, draw_charts
from cocodiff_compile.schedule.estimate import OrderEstimate, ScheduleEstimate

SUFFIXES = (".svg", ".png", ".pdf", ".json")
_COMPUTE, _LINKS = "compute", "links"


def draw_schedule(estimate: ScheduleEstimate, file: Path) -> None:
    """Writes a picture, or with `.json` a trace."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"{file}: the name must end in {', '.join(SUFFIXES)}")
    orders = {"as captured": estimate.before, "as ordered": estimate.after}
    charts = {
        name: LaneChart(
            f"{name}: {order.step_s * 1e3:.1f} ms, of which {order.exposed_s * 1e3:.1f} ms exposed",
            (_COMPUTE, _LINKS),
            [_trace_span(span, estimate.tasks[span.place]) for span in order.spans],
        )
        for name, order in orders.items()
    }
    if file.suffix == ".json":
        trace = ChromeTrace()
        for name, chart in charts.items():
            trace.add_process(f"{name}, estimated", chart.lanes, chart.spans)
        file.write_text(json.dumps(trace.to_json()))
        return
    site = _middle_site(estimate)
    parts = [charts[name].between(*_around(order, site)) for name, order in orders.items()]
    draw_charts(parts, f"estimated: attention {site} of a step, and what runs beside it", [file])


def _trace_span(span: Span, task: Task) -> TraceSpan:
    lane = _LINKS if task.kind == "start" else _COMPUTE
    return TraceSpan(lane, task.name, _category(task), span.begin_s * 1e6, span.seconds * 1e6)


def _category(task: Task) -> str:
    if task.kind == "compute":
        return "matmul" if task.site == NO_SITE else "attention"
    return "exchange" if task.kind == "start" else "wait"


def _middle_site(estimate: ScheduleEstimate) -> int:
    sites = sorted({item.site for item in estimate.after.exchanges} - {NO_SITE})
    return sites[len(sites) // 2]


def _around(order: OrderEstimate, site: int) -> tuple[float, float]:
    """Returns when the first exchange of an attention begins and its last one ends, in
    microseconds.
    """
    own = [item for item in order.exchanges if item.site == site]
    return min(item.begin_s for item in own) * 1e6, max(item.end_s for item in own) * 1e6
