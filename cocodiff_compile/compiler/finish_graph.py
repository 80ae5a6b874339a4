"""Finishes a compile: orders the graph, reports what was done, and generates its code."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from cocodiff_compile.compat import inductor_settings
from cocodiff_compile.compiler.compilation import Compilation
from cocodiff_compile.compiler.generated_order import graph_kinds, keeps_order
from cocodiff_compile.compiler.graph_rounds import GraphRounds, checked
from cocodiff_compile.compiler.pin_order import pinned
from cocodiff_compile.compiler.stages import ORDER, Deciding, stages
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.pipeline.run_passes import Pipeline, PipelineReport
from cocodiff_compile.report.collect import GraphReport, publish
from cocodiff_compile.report.describe import describe_report, format_graph
from cocodiff_compile.report.dumps import FolderDump, TraceDump
from cocodiff_compile.say_once import say_once

log = logging.getLogger(__name__)

_graph_numbers = itertools.count()

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
        _publish(gm.graph, report, self.compilation, dumps)
        rounds.compare_planned(gm.graph, report.recognition, report.decision)
        plans = rounds.plans(gm.graph, report.recognition)
        with inductor_settings(self.codegen_settings):
            return checked(self._generate(gm, example_inputs, report), plans)

    def _generate(
        self, gm: GraphModule, example_inputs: Sequence[Any], report: PipelineReport
    ) -> Any:
        generate = functools.partial(self.compilation.generate, **self.compilation.inductor_options)
        if not report.is_ordered:
            return generate(gm, example_inputs)
        kinds = graph_kinds(gm.graph)
        with pinned():
            compiled = generate(gm, example_inputs)
        if keeps_order(getattr(compiled, "source_code", ""), kinds) is False:
            say_once(log, logging.WARNING, _LOST_ORDER)
        return compiled


@dataclass(frozen=True)
class Dumps:
    """Writes one graph down while passes run."""

    number: int
    rank: int
    folder: Path | None

    @classmethod
    def of(cls, config: CompileConfig) -> Dumps:
        number = next(_graph_numbers)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder = config.debug_dir and config.debug_dir / f"rank_{rank:03d}" / f"graph_{number:03d}"
        return cls(number, rank, folder)

    def of_kind(self, kind: str) -> Dumps:
        """Returns the dumps for one kind of denoising step, in a folder inside of this one."""
        return replace(self, folder=self.folder and self.folder / kind.replace(" ", "_"))

    @functools.cached_property
    def observers(self) -> tuple[FolderDump | TraceDump, ...]:
        if self.folder is None:
            return (TraceDump(),)
        return (TraceDump(), FolderDump(self.folder, self.rank, self.number))


def _publish(graph: Graph, report: PipelineReport, compilation: Compilation, dumps: Dumps) -> None:
    summary = describe_report(report)
    config, num_nodes = compilation.config, len(graph.nodes)
    is_dry_run = compilation.dry_run
    found = GraphReport(dumps.number, dumps.rank, config, report, summary, num_nodes, is_dry_run)
    for dump in dumps.observers:
        dump.finished(found.summary)
    if not compilation.dry_run:
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
