"""Passes run in order, each leaving a graph that keeps the rules; observers watch.

The rules, checked before the first pass and after each one: the graph lints, every call stands for
a known value, every collective is waited for. A graph that comes in broken is not ours to touch; a
pass that breaks one is an `InvariantError` that names pass and node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch.fx import Graph, GraphModule, Node

from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.aten import WAIT, is_collective
from cocodiff_compile.ir.records import Declined, Recognition
from cocodiff_compile.pipeline.graph_pass import GraphPass, PassResult
from cocodiff_compile.schedule.estimate import ScheduleEstimate

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Watches a pipeline; must not change the graph."""

    def captured(self, module: GraphModule) -> None: ...

    def after_pass(self, name: str, module: GraphModule, result: PassResult) -> None: ...


@dataclass(frozen=True)
class PassRecord:
    """A pass that ran: its name, what it did, and how long it took."""

    name: str
    result: PassResult
    seconds: float

    def without_recognition(self) -> PassRecord:
        return replace(self, result=replace(self.result, recognition=None))


@dataclass(frozen=True)
class PipelineReport:
    """All passes of one graph, in order; `refused` says why none ran."""

    passes: tuple[PassRecord, ...] = ()
    refused: str = ""

    def with_pass(self, record: PassRecord) -> PipelineReport:
        """This and one more. If that found anew what was recognised, the old finds are let go: they
        hold nodes that are in no graph any more, and with them all that these read.
        """
        passes = self.passes
        if record.result.recognition is not None:
            passes = tuple(item.without_recognition() for item in passes)
        return PipelineReport((*passes, record))

    @property
    def recognition(self) -> Recognition:
        """What the last recognition of the run found."""
        for record in reversed(self.passes):
            if record.result.recognition is not None:
                return record.result.recognition
        return Recognition()

    @property
    def estimate(self) -> ScheduleEstimate | None:
        """Of the order that was chosen last, if one was."""
        found = (item.result.estimate for item in reversed(self.passes))
        return next(filter(None, found), None)

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the graph was chosen, and is to be kept."""
        return any(item.result.estimate and item.result.changed for item in self.passes)

    @property
    def declined(self) -> tuple[Declined, ...]:
        """Everything left alone, by recognition and by every pass after it."""
        own = tuple(item for record in self.passes for item in record.result.declined)
        return self.recognition.declined + own


@dataclass(frozen=True)
class Pipeline:
    """A fixed sequence of passes."""

    passes: tuple[GraphPass, ...]
    observers: tuple[Observer, ...] = field(default=())

    def run(self, module: GraphModule, before: PipelineReport | None = None) -> PipelineReport:
        """Runs every pass on `module`, in place; `before` is the report of passes already run."""
        if before is None:
            before = self._begin(module)
        report = before
        for item in self.passes if not before.refused else ():
            record = self._run_pass(item, module, report.recognition)
            report = report.with_pass(record)
        return report

    def _begin(self, module: GraphModule) -> PipelineReport:
        for observer in self.observers:
            observer.captured(module)
        if broken := broken_rule(module.graph):
            return PipelineReport(refused=f"the captured graph cannot be worked on: {broken}")
        return PipelineReport()

    def _run_pass(
        self, graph_pass: GraphPass, module: GraphModule, found: Recognition
    ) -> PassRecord:
        begin = time.perf_counter()
        result = graph_pass.run(module.graph, found)
        if result.changed:
            _refuse_broken(graph_pass.name, _lint_error(module.graph.eliminate_dead_code))
            module.recompile()
        _refuse_broken(graph_pass.name, broken_rule(module.graph))
        record = PassRecord(graph_pass.name, result, time.perf_counter() - begin)
        log.debug("%s took %.3f s", record.name, record.seconds)
        for observer in self.observers:
            observer.after_pass(graph_pass.name, module, result)
        return record


def _refuse_broken(pass_name: str, broken: str) -> None:
    if broken:
        raise InvariantError(f"pass {pass_name!r} broke the graph: {broken}")


def _lint_error(lint: Callable[[], object]) -> str:
    """What speaks against a graph, by a function that lints it; dropping dead code does first."""
    try:
        lint()
    except RuntimeError as error:
        return f"lint: {error}"
    return ""


def broken_rule(graph: Graph) -> str:
    """The first rule that does not hold, in words; empty if all hold."""
    if broken := _lint_error(graph.lint):
        return broken
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "val" not in node.meta:
            return f"node {node.name} ({node.target}) has no value"
        if is_collective(node) and not any(user.target is WAIT for user in _readers(node)):
            return f"collective {node.name} ({node.target}) is never waited for"
    return ""


def _readers(node: Node) -> list[Node]:
    """Those of the result, and those of its parts where a collective returns several tensors."""
    readers = list(node.users)
    return readers + [after for reader in readers for after in reader.users]
