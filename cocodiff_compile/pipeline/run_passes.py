# SPDX-License-Identifier: Apache-2.0
"""Runs stages in order. Each chooses what it does to the graph and applies it; observers watch.

The rules, checked before the first pass and after each one: the graph lints, every call stands for
a known value, every collective is waited for. A graph that comes in broken is not ours to touch; a
pass that breaks one is an `InvariantError` that names pass and node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.decide.decision import Decision
from cocodiff_compile.decide.shard_report import ShardReport
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.collectives import is_collective, is_wait
from cocodiff_compile.ir.graph_pass import GraphPass, PassResult
from cocodiff_compile.ir.records import Declined, Recognition
from cocodiff_compile.schedule.estimate import ScheduleEstimate
from cocodiff_compile.v_major.payload import EXACT

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Watches a pipeline; must not change the graph. The module's code is generated only after the
    last stage: an observer that shows code generates it from the graph.
    """

    def captured(self, module: GraphModule) -> None: ...

    def after_pass(self, name: str, module: GraphModule, result: PassResult) -> None: ...


@dataclass(frozen=True)
class Chosen:
    """Says what a stage does to one graph."""

    graph_pass: GraphPass | None = None
    """The pass that applies what was chosen; None leaves the graph as it is."""
    notes: tuple[str, ...] = ()
    declined: tuple[Declined, ...] = ()
    estimate: ScheduleEstimate | None = None
    sharing: ShardReport | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the decision that were chosen here."""


@dataclass(frozen=True)
class Stage:
    """A place in the pipeline. `choose` says what is done to a graph; None if it is turned off."""

    name: str
    choose: Callable[[Graph, Recognition], Chosen | None]

    @classmethod
    def of(cls, graph_pass: GraphPass) -> Stage:
        """A stage that always runs one pass."""
        return cls(graph_pass.name, lambda _graph, _found: Chosen(graph_pass))


@dataclass(frozen=True)
class PassRecord:
    """A stage that ran: its name, what its pass did, and how long it took."""

    name: str
    result: PassResult
    seconds: float
    estimate: ScheduleEstimate | None = None
    sharing: ShardReport | None = None


@dataclass(frozen=True)
class PipelineReport:
    """Reports on all passes of one graph, in order; `refused` says why none ran."""

    passes: tuple[PassRecord, ...] = ()
    refused: str = ""
    decision: Decision = field(default_factory=Decision)
    fingerprint: str = ""
    """Tells the captured graph apart from others; empty where nobody asks for it."""
    kind: str = EXACT
    """The kind of denoising step, with V-Major."""

    def with_pass(self, record: PassRecord, decided: Mapping[str, Any]) -> PipelineReport:
        """Returns this report with one more pass. If that pass recognised the graph again, earlier
        recognitions are dropped: they hold nodes that are in no graph any more.
        """
        passes = self.passes
        if record.result.recognition is not None:
            passes = tuple(
                replace(item, result=replace(item.result, recognition=None)) for item in passes
            )
        decision = replace(self.decision, **decided)
        return replace(self, passes=(*passes, record), decision=decision)

    @property
    def recognition(self) -> Recognition:
        """Returns what the last recognition of the run found."""
        for record in reversed(self.passes):
            if record.result.recognition is not None:
                return record.result.recognition
        return Recognition()

    @property
    def estimate(self) -> ScheduleEstimate | None:
        """Returns the estimate of the order that was chosen last, if one was."""
        found = (item.estimate for item in reversed(self.passes))
        return next(filter(None, found), None)

    @property
    def sharing(self) -> ShardReport | None:
        """Returns what was decided about sharing tokens out, if that was asked for."""
        return next(filter(None, (item.sharing for item in self.passes)), None)

    @property
    def is_ordered(self) -> bool:
        """Returns whether a new order of the graph was chosen, and is to be kept."""
        return self.decision.order is not None

    @property
    def declined(self) -> tuple[Declined, ...]:
        """Returns everything left alone, by recognition and by every pass after it."""
        own = tuple(item for record in self.passes for item in record.result.declined)
        return self.recognition.declined + own


@dataclass(frozen=True)
class Pipeline:
    """A fixed sequence of stages."""

    stages: tuple[Stage, ...]
    observers: tuple[Observer, ...] = field(default=())

    def run(self, module: GraphModule, before: PipelineReport | None = None) -> PipelineReport:
        """Runs every stage on `module`, in place; `before` is the report of stages already run."""
        report = before or self._begin(module)
        num_before = len(report.passes)
        for stage in self.stages if not report.refused else ():
            report = self._run_stage(stage, module, report)
        if any(record.result.changed for record in report.passes[num_before:]):
            module.recompile()
        return report

    def _begin(self, module: GraphModule) -> PipelineReport:
        for observer in self.observers:
            observer.captured(module)
        if broken := broken_rule(module.graph):
            return PipelineReport(refused=f"the captured graph cannot be worked on: {broken}")
        return PipelineReport()

    def _run_stage(
        self, stage: Stage, module: GraphModule, report: PipelineReport
    ) -> PipelineReport:
        begin = time.perf_counter()
        chosen = stage.choose(module.graph, report.recognition)
        if chosen is None:
            return report
        result = apply_choice(chosen, module.graph, report.recognition)
        if result.changed:
            _refuse_broken(stage.name, _lint_error(module.graph.eliminate_dead_code))
        _refuse_broken(stage.name, broken_rule(module.graph))
        seconds = time.perf_counter() - begin
        record = PassRecord(stage.name, result, seconds, chosen.estimate, chosen.sharing)
        log.debug("%s took %.3f s", record.name, record.seconds)
        for observer in self.observers:
            observer.after_pass(stage.name, module, result)
        return report.with_pass(record, chosen.decided)


def apply_choice(chosen: Chosen, graph: Graph, recognition: Recognition) -> PassResult:
    """The result of the pass, with what was said when it was chosen."""
    result = PassResult(changed=False)
    if chosen.graph_pass is not None:
        result = chosen.graph_pass.run(graph, recognition)
    return replace(
        result,
        declined=(*chosen.declined, *result.declined),
        notes=(*result.notes, *chosen.notes),
    )


def _refuse_broken(pass_name: str, broken: str) -> None:
    if broken:
        raise InvariantError(f"pass {pass_name!r} broke the graph: {broken}")


def _lint_error(lint: Callable[[], object]) -> str:
    """Returns what a function that lints a graph says against it; nothing if it passes."""
    try:
        lint()
    except RuntimeError as error:
        return f"lint: {error}"
    return ""


def broken_rule(graph: Graph) -> str:
    """Returns the first rule that does not hold, in words; nothing if all hold."""
    if broken := _lint_error(graph.lint):
        return broken
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "val" not in node.meta:
            return f"node {node.name} ({node.target}) has no value"
        if is_collective(node) and not any(map(is_wait, _readers(node))):
            return f"collective {node.name} ({node.target}) is never waited for"
    return ""


def _readers(node: Node) -> list[Node]:
    """Returns the readers of a collective's result, and of its parts if it has several."""
    readers = list(node.users)
    return readers + [after for reader in readers for after in reader.users]
