"""What compiles report, for whoever listens: `explain`, the demo, tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.pipeline.run_passes import PipelineReport


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph. `report` points into the graph and is good until code is generated from
    it; the rest is plain data and stays.
    """

    number: int
    rank: int
    config: CompileConfig
    report: PipelineReport
    summary: dict[str, Any]
    num_nodes: int
    """Of the graph that code is generated from."""


_listeners: list[list[GraphReport]] = []


@contextmanager
def collect_reports() -> Iterator[list[GraphReport]]:
    """Every graph that backend "cocodiff" compiles inside the block, in order."""
    reports: list[GraphReport] = []
    _listeners.append(reports)
    try:
        yield reports
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not reports]


def publish(report: GraphReport) -> None:
    """Hands a report to every open `collect_reports` block."""
    for listener in _listeners:
        listener.append(report)
