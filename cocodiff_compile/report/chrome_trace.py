"""Builds Chrome traces, which https://ui.perfetto.dev opens: processes, threads, and spans in
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TraceSpan:
    thread: str
    name: str
    category: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass
class ChromeTrace:
    _events: list[dict[str, Any]] = field(default_factory=list)
    _num_processes: int = 0

    def add_process(self, title: str, threads: Sequence[str], spans: Iterable[TraceSpan]) -> None:
        """Adds a process below those added before, with its `threads` from top to bottom."""
        process, self._num_processes = self._num_processes, self._num_processes + 1
        numbers = {thread: number for number, thread in enumerate(threads)}
        self._about("process_name", process, 0, name=title)
        self._about("process_sort_index", process, 0, sort_index=process)
        for thread, number in numbers.items():
            self._about("thread_name", process, number, name=thread)
        for span in spans:
            self._events.append(
                {
                    "name": span.name,
                    "cat": span.category,
                    "ph": "X",
                    "ts": span.start_us,
                    "dur": span.duration_us,
                    "pid": process,
                    "tid": numbers[span.thread],
                }
            )

    def _about(self, what: str, process: int, thread: int, **args: Any) -> None:
        self._events.append({"name": what, "ph": "M", "pid": process, "tid": thread, "args": args})

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object format of the trace viewer."""
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}
