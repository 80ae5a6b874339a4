# SPDX-License-Identifier: Apache-2.0
"""Draws the estimated timeline of a step, before and after it was ordered, as a picture or a trace.

The picture shows one attention in the middle of the program, from its first exchange to its last,
as captured above and as ordered below. The trace (`.json`, for https://ui.perfetto.dev) holds the
whole step.
"""

from __future__ import annotations

import json
from pathlib import Path

from cocodiff_compile.cost.tasks import NO_SITE
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.errors import UserError
from cocodiff_compile.report.chrome_trace import ChromeTrace
from cocodiff_compile.report.lane_charts import LaneChart, draw_charts
from cocodiff_compile.schedule.estimate import OrderEstimate, ScheduleEstimate

SUFFIXES = (".svg", ".png", ".pdf", ".json")


def draw_schedule(estimate: ScheduleEstimate, file: Path) -> None:
    """Writes a picture, or with `.json` a trace. Raises UserError for any other name."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"{file}: the name must end in {', '.join(SUFFIXES)}")
    orders = {"as captured": estimate.before, "as ordered": estimate.after}
    if file.suffix == ".json":
        trace = ChromeTrace()
        for name, order in orders.items():
            trace.add_process(f"{name}, estimated", order.timeline)
        file.write_text(json.dumps(trace.to_json()))
        return
    site = _middle_site(estimate)
    charts = [
        LaneChart(_title(name, order.timeline), _around(order, site))
        for name, order in orders.items()
    ]
    draw_charts(charts, f"estimated: attention {site} of a step, and what runs beside it", [file])


def _title(name: str, whole: Timeline) -> str:
    return f"{name}: {whole.step_s * 1e3:.1f} ms, of which {whole.exposed_s * 1e3:.1f} ms exposed"


def _middle_site(estimate: ScheduleEstimate) -> int:
    sites = sorted({item.site for item in estimate.after.exchanges} - {NO_SITE})
    return sites[len(sites) // 2]


def _around(order: OrderEstimate, site: int) -> Timeline:
    """Returns the time from the first exchange of an attention to its last."""
    own = [item.span for item in order.exchanges if item.site == site]
    begin_s, end_s = min(span.begin_s for span in own), max(span.end_s for span in own)
    return order.timeline.between(begin_s, end_s)
