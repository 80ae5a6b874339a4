"""Timelines as a Chrome trace, which https://ui.perfetto.dev opens.

One process per case and way, one thread per resource: the compute stream, then each process group
(latency and transfer) and each link class it moves bytes over. Spans of one thread never overlap.
"""

from __future__ import annotations

from typing import Any

from cocodiff_compile.simulate.engine import Span
from cocodiff_compile.simulate.run import Row, Simulation

_MICROSECONDS = 1e6


def trace_data(simulation: Simulation) -> dict[str, Any]:
    """The JSON object format of the trace viewer."""
    events: list[dict[str, Any]] = []
    for process, row in enumerate(simulation.rows):
        events += _process_events(process, row)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process_events(process: int, row: Row) -> list[dict[str, Any]]:
    title = f"{row.nodes} nodes, {row.degree} ranks, {row.way} (simulated)"
    threads = _threads(row.timeline.spans)
    events = [_name("process_name", process, 0, title)]
    events.append({**_name("process_sort_index", process, 0, ""), "args": {"sort_index": process}})
    for track, thread in threads.items():
        events.append(_name("thread_name", process, thread, track))
    for span in row.timeline.spans:
        events.append(
            {
                "name": span.name,
                "cat": span.track.split(" ")[0],
                "ph": "X",
                "ts": span.start_s * _MICROSECONDS,
                "dur": span.seconds * _MICROSECONDS,
                "pid": process,
                "tid": threads[_thread_of(span)],
            }
        )
    return events


def _thread_of(span: Span) -> str:
    """The compute stream shows its waits too."""
    return "compute" if span.track == "wait" else span.track


def _threads(spans: tuple[Span, ...]) -> dict[str, int]:
    names = sorted({_thread_of(span) for span in spans} - {"compute"})
    return {name: number for number, name in enumerate(["compute", *names])}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
