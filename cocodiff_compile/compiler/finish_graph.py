# SPDX-License-Identifier: Apache-2.0
"""Finishes a compile: orders the graph, reports what was done, and generates its code."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from cocodiff_compile.compat import inductor_settings
from cocodiff_compile.compiler.compilation import Compilation
from cocodiff_compile.compiler.dumps import Dumps
from cocodiff_compile.compiler.generated_order import graph_kinds, keeps_order
from cocodiff_compile.compiler.graph_rounds import GraphRounds, checked
from cocodiff_compile.compiler.pin_order import pinned
from cocodiff_compile.compiler.stages import ORDER, Deciding, stages
from cocodiff_compile.pipeline.run_passes import Pipeline, PipelineReport
from cocodiff_compile.report.collect import GraphReport, publish
from cocodiff_compile.report.describe import describe_report, format_graph
from cocodiff_compile.report.page_data import Around, describe_page
from cocodiff_compile.say_once import say_once

log = logging.getLogger(__name__)

_LOST_ORDER = (
    "Inductor did not keep the order of schedule-v-first: exchanges may be exposed, results are "
    "the same; options={'v_first': False} leaves the order to Inductor"
)


@dataclass(frozen=True)
class FinishGraph:
    """Turns a graph whose attentions are cut into code."""

    compilation: Compilation
    deciding_of: Callable[[str], Deciding]
    """What a kind of denoising step is decided by."""
    codegen_settings: Mapping[str, Any]
    """Inductor's settings while it makes code of what the passes left."""

    def run(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        report: PipelineReport,
        dumps: Dumps,
        rounds: GraphRounds,
    ) -> Any:
        ordering = stages(ORDER, self.deciding_of(report.kind)) if report.recognition.sites else ()
        report = Pipeline(ordering, dumps.observers).run(gm, report)
        self._publish(gm.graph, report, dumps)
        rounds.compare_planned(gm.graph, report.recognition, report.decision)
        plans = rounds.plans(gm.graph, report.recognition)
        with inductor_settings(self.codegen_settings):
            return checked(self._generate(gm, example_inputs, report, dumps), plans)

    def _generate(
        self, gm: GraphModule, example_inputs: Sequence[Any], report: PipelineReport, dumps: Dumps
    ) -> Any:
        generate = functools.partial(self.compilation.generate, **self.compilation.inductor_options)
        if not report.is_ordered:
            return generate(gm, example_inputs)
        kinds = graph_kinds(gm.graph)
        with pinned():
            compiled = generate(gm, example_inputs)
        if keeps_order(getattr(compiled, "source_code", ""), kinds) is False:
            say_once(log, logging.WARNING, _LOST_ORDER)
            dumps.update_page(report.kind, lost_order=True)
        return compiled

    def _publish(self, graph: Graph, report: PipelineReport, dumps: Dumps) -> None:
        summary = describe_report(report)
        config, is_dry_run = self.compilation.config, self.compilation.dry_run
        page = None
        if dumps.history is not None:
            deciding = self.deciding_of(report.kind) if report.recognition.sites else None
            around = Around(
                dumps.number,
                dumps.rank,
                config,
                deciding.costs if deciding else None,
                deciding.machines if deciding else {},
                is_dry_run,
            )
            page = describe_page(graph, report, summary, dumps.history, around)
        num_nodes = len(graph.nodes)
        found = GraphReport(
            dumps.number, dumps.rank, config, report, summary, num_nodes, is_dry_run, page
        )
        dumps.finish(found)
        if not is_dry_run:
            _say_what_was_found(found)
        publish(found)


def _say_what_was_found(found: GraphReport) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("graph %d:\n%s", found.number, format_graph(found.summary))
    report = found.report
    for item in report.declined:
        where = item.module_path or item.node.name
        say_once(log, logging.WARNING, f"declined {where}: {item.reason}")
    if report.refused:
        say_once(log, logging.WARNING, f"{report.refused}; Inductor compiles it unchanged")
    elif "recognize-ulysses" in found.config.disable:
        say_once(log, logging.WARNING, "recognize-ulysses is disabled: Inductor compiles unchanged")
    elif not report.recognition.sites:
        say_once(log, logging.WARNING, _no_site_message(found))


def _no_site_message(found: GraphReport) -> str:
    message = "a graph holds no Ulysses attention, Inductor compiles it unchanged"
    if not torch.distributed.is_initialized():
        return (
            f"{message}: no process group is initialised, call torch.distributed.init_process_group"
        )
    if found.config.shard is not None:
        notes = [note for item in found.summary["passes"] for note in item["notes"]]
        return "; ".join([message, *notes])
    return (
        f"{message}; if no graph of the model holds one, options={{'shard': 'tokens'}} makes it of "
        "a plain model"
    )
