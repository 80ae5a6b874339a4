# SPDX-License-Identifier: Apache-2.0
"""Collects the reports of compilations, for `explain`, `cocodiff check`, pages and tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.decide.decision_file import GivenDecisions, GraphDecision, write_decisions
from cocodiff_compile.errors import UserError
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
    is_dry_run: bool = False
    page: dict[str, Any] | None = None
    """What its page shows, as plain data; None where no page was asked for."""


_listeners: list[list[GraphReport]] = []


@contextmanager
def collect_reports() -> Iterator[list[GraphReport]]:
    """Collects a report of every graph that backend "cocodiff" compiles inside of the block."""
    reports: list[GraphReport] = []
    _listeners.append(reports)
    try:
        yield reports
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not reports]


def save_decisions(reports: Iterable[GraphReport], path: str | Path) -> None:
    """Writes what was decided for each graph to a file, for `options={"decision": path}` of a later
    start. The reports are those of `collect_reports`, or the graphs of an `Explanation`; all of
    them must come from compiles with the same options.
    """
    reports = [item for item in reports if item.report.fingerprint]
    if not reports:
        raise UserError("there is no decision to save: no graph with a Ulysses attention")
    settings = [item.config.made_with(item.is_dry_run) for item in reports]
    if any(other != settings[0] for other in settings):
        raise UserError("the graphs were compiled with different options: save them one by one")
    decisions = {
        (item.report.fingerprint, item.report.kind): item.report.decision for item in reports
    }
    graphs = tuple(GraphDecision(*key, decision) for key, decision in decisions.items())
    write_decisions(GivenDecisions(settings[0], graphs), Path(path))


def is_collecting() -> bool:
    """Returns whether a `collect_reports` block is open."""
    return bool(_listeners)


def publish(report: GraphReport) -> None:
    """Passes a report to every open `collect_reports` block."""
    for listener in _listeners:
        listener.append(report)
