"""Collects the reports of compilations, for `explain`, the demo and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.pipeline.run_passes import PipelineReport


@dataclass(frozen=True)
class GraphReport:
    """Reports one compiled graph. `report` refers to nodes of the graph and is valid until code is
    generated from it; the rest is plain data.
    """

    number: int
    rank: int
    config: CompileConfig
    report: PipelineReport
    summary: dict[str, Any]
    num_nodes: int
    """The number of nodes of the graph that code is generated from."""


_listeners: list[list[GraphReport]] = []


@contextmanager
def collect_reports() -> Iterator[list[GraphReport]]:
    """Collects a report of every graph that backend "cocodiff" compiles inside of the block, in
    order.
    """
    reports: list[GraphReport] = []
    _listeners.append(reports)
    try:
        yield reports
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not reports]


def publish(report: GraphReport) -> None:
    """Passes a report to every open `collect_reports` block."""
    for listener in _listeners:
        listener.append(report)
