# SPDX-License-Identifier: Apache-2.0
"""Builds Chrome traces, which https://ui.perfetto.dev opens: processes, threads and spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cocodiff_compile.cost.timeline import Timeline

_MICROSECONDS = 1e6


@dataclass
class ChromeTrace:
    """Timelines one below the other, in the order in which they are added."""

    _events: list[dict[str, Any]] = field(default_factory=list)
    _num_processes: int = 0

    def add_process(self, title: str, timeline: Timeline) -> None:
        """Adds a timeline below those added before."""
        process, self._num_processes = self._num_processes, self._num_processes + 1
        threads = {lane: number for number, lane in enumerate(timeline.lanes)}
        self._about("process_name", process, 0, name=title)
        self._about("process_sort_index", process, 0, sort_index=process)
        for lane, number in threads.items():
            self._about("thread_name", process, number, name=lane)
        for span in timeline.spans:
            self._events.append(
                {
                    "name": span.name,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": span.begin_s * _MICROSECONDS,
                    "dur": span.seconds * _MICROSECONDS,
                    "pid": process,
                    "tid": threads[span.lane],
                }
            )

    def _about(self, what: str, process: int, thread: int, **args: Any) -> None:
        self._events.append({"name": what, "ph": "M", "pid": process, "tid": thread, "args": args})

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object format of the trace viewer."""
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}
