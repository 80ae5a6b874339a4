"""Timelines as a Chrome trace, which https://ui.perfetto.dev opens.

One process per case and way, one thread per resource: the compute stream, then each process group
(latency and transfer) and each link class it moves bytes over. Spans of one thread never overlap.
"""

from __future__ import annotations

from typing import Any

from cocodiff_compile.lab.simulate.engine import Span
from cocodiff_compile.lab.simulate.run import Simulation
from cocodiff_compile.report.chrome_trace import ChromeTrace, TraceSpan

_MICROSECONDS = 1e6


def trace_data(simulation: Simulation) -> dict[str, Any]:
    """The JSON object format of the trace viewer."""
    trace = ChromeTrace()
    for row in simulation.rows:
        title = f"{row.nodes} nodes, {row.degree} ranks, {row.way} (simulated)"
        spans = row.timeline.spans
        trace.add_process(title, _threads(spans), map(_trace_span, spans))
    return trace.to_json()


def _trace_span(span: Span) -> TraceSpan:
    return TraceSpan(
        _thread_of(span),
        span.name,
        span.track.split(" ")[0],
        span.start_s * _MICROSECONDS,
        span.seconds * _MICROSECONDS,
    )


def _thread_of(span: Span) -> str:
    """The compute stream shows its waits too."""
    return "compute" if span.track == "wait" else span.track


def _threads(spans: tuple[Span, ...]) -> list[str]:
    return ["compute", *sorted({_thread_of(span) for span in spans} - {"compute"})]
