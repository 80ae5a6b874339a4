"""Writes timelines as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from typing import Any

from cocodiff_compile.lab.simulate.run import Simulation
from cocodiff_compile.report.chrome_trace import ChromeTrace


def trace_data(simulation: Simulation) -> dict[str, Any]:
    """Returns the JSON object format of the trace viewer, with a process per case and way."""
    trace = ChromeTrace()
    for row in simulation.rows:
        title = f"{row.nodes} nodes, {row.degree} ranks, {row.way} (simulated)"
        trace.add_process(title, row.timeline)
    return trace.to_json()
