# SPDX-License-Identifier: Apache-2.0
"""Explains what the backend would do with a model, without generating its code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.fx import GraphModule

from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.dry_run import stand_in
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.decide.shard_report import ShardReport
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir.records import Declined, UlyssesSite
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.collect import GraphReport, collect_reports
from cocodiff_compile.report.describe import format_graph
from cocodiff_compile.report.draw_schedule import draw_schedule
from cocodiff_compile.report.rank_page import write_page
from cocodiff_compile.shard.model_calls import as_in_later_calls


@dataclass(frozen=True)
class Explanation:
    """Explains all graphs of one call: print it, draw it, take its sites or what was declined."""

    graphs: tuple[GraphReport, ...]

    @property
    def sites(self) -> tuple[UlyssesSite, ...]:
        return tuple(site for graph in self.graphs for site in graph.report.recognition.sites)

    @property
    def declined(self) -> tuple[Declined, ...]:
        return tuple(item for graph in self.graphs for item in graph.report.declined)

    @property
    def sharing(self) -> tuple[ShardReport, ...]:
        """Returns what was decided about sharing tokens out, for each graph where it was asked."""
        found = (graph.report.sharing for graph in self.graphs)
        return tuple(report for report in found if report is not None)

    def to_json(self) -> str:
        """Returns the summaries of all graphs as one JSON text."""
        graphs = [{"graph": graph.number, **graph.summary} for graph in self.graphs]
        return json.dumps({"graphs": graphs}, indent=1)

    def draw(self, file: str | Path) -> None:
        """Draws the estimated step, as captured and as ordered: one attention in the middle of the
        largest graph as a picture (`.svg`, `.png`, `.pdf`), all of it as a trace (`.json`).
        """
        ordered = [graph.report.estimate for graph in self.graphs if graph.report.estimate]
        if not ordered:
            raise UserError("nothing to draw: no order was estimated for any graph")
        draw_schedule(max(ordered, key=lambda item: len(item.tasks)), Path(file))

    def write_page(self, file: str | Path) -> None:
        """Writes all of it as one HTML file, which needs no other file and no network; with `.json`
        the data that it shows.
        """
        pages = [graph.page for graph in self.graphs if graph.page is not None]
        try:
            write_page(pages, Path(file))
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from None

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing to explain: no inference graph was captured"
        head = (
            f"{_count(len(self.graphs), 'graph')}, {_count(len(self.sites), 'Ulysses attention')}"
        )
        tables = [
            f"graph {place}\n{format_graph(graph.summary)}"
            for place, graph in enumerate(self.graphs)
        ]
        return "\n\n".join([head, *tables])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Captures `model(*args, **kwargs)`, runs every pass, and tells what was found and done.

    No code is generated and nothing is computed: behind a graph break the next piece, and Python
    code that reads values, see zeros of the right shapes. Gradients are off during the call. What
    torch.compile has compiled of this model, and may still compile, is not touched.

    Without a process group, `shard["degree"]` says over how many ranks tokens would be shared out.
    """
    config = CompileConfig.from_options(options)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, example_inputs, config, stand_in, dry_run=True)

    with _asked_ranks(config), as_in_later_calls(), torch.no_grad(), collect_reports() as reports:
        compiled = torch.compile(  # type: ignore[call-overload]
            model, backend=backend, isolate_recompiles=True
        )
        compiled(*args, **kwargs)
    return Explanation(tuple(reports))


def _asked_ranks(config: CompileConfig) -> AbstractContextManager[None]:
    """Returns a context with the ranks that the options ask for, if no process group has any."""
    degree = config.shard.degree if config.shard is not None else None
    if degree is None or not dist.is_available() or dist.is_initialized():
        return nullcontext()
    return fake_ranks(degree)
