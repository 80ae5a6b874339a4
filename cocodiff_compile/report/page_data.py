# SPDX-License-Identifier: Apache-2.0
"""Turns what is known of one compiled graph into plain data, from which its page is made. It must
be called before code generation consumes the graph.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cost.exchanges import exchange_seconds, phase_seconds
from cocodiff_compile.cost.tasks import Task
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.decide.decision import ExchangePhases
from cocodiff_compile.ir.records import Recognition, UlyssesSite
from cocodiff_compile.pipeline.run_passes import PipelineReport
from cocodiff_compile.report.describe import format_graph
from cocodiff_compile.report.graph_history import GraphHistory
from cocodiff_compile.report.graph_text import module_of, op_name, value_text
from cocodiff_compile.schedule.estimate import OrderEstimate, estimate_in_order
from cocodiff_compile.schedule.graph_tasks import graph_tasks
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.files import topology_data
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import format_phases

_NANOSECONDS = 1e9


@dataclass(frozen=True)
class Around:
    """Holds what is known of a compilation beside its graph."""

    number: int
    rank: int
    config: CompileConfig
    costs: Costs | None
    machines: Mapping[str, Machine]
    is_dry_run: bool


def describe_page(
    graph: Graph,
    report: PipelineReport,
    summary: Mapping[str, Any],
    history: GraphHistory,
    around: Around,
) -> dict[str, Any]:
    """Returns all that the page of a graph shows, as dicts, lists, texts and numbers."""
    final = _final(graph, report)
    return {
        "graph": around.number,
        "kind": report.kind,
        "rank": around.rank,
        "is_dry_run": around.is_dry_run,
        "num_nodes": len(graph.nodes),
        "versions": _versions(),
        "options": _options(around.config),
        "device": around.costs.device.name if around.costs else "",
        "machines": _machines(report, around.machines),
        "summary": dict(summary),
        "text": format_graph(dict(summary)),
        "head_chunks": list(report.decision.head_chunks),
        "is_ordered": report.is_ordered,
        "captured": history.step,
        "final": final,
        "stages": history.to_data(),
    }


def describe_captured(
    graph: Graph, recognition: Recognition, costs: Costs | None
) -> dict[str, Any] | None:
    """Returns the step of a graph before anything was cut, flat exchanges in their order."""
    if costs is None or not recognition.sites:
        return None
    tasks = graph_tasks(graph, recognition, costs)
    nodes = {node.name: node for node in tasks.nodes}
    order = estimate_in_order(tasks.tasks)
    return describe_order("as captured", tasks.tasks, order, nodes, recognition.sites)


def _final(graph: Graph, report: PipelineReport) -> dict[str, Any] | None:
    """Returns the step in the order that was chosen, which may be the captured one."""
    estimate = report.estimate
    if estimate is None:
        return None
    nodes = {node.name: node for node in graph.nodes}
    order = estimate.after if report.is_ordered else estimate.before
    title = "as ordered" if report.is_ordered else "as compiled, in the captured order"
    return describe_order(title, estimate.tasks, order, nodes, report.recognition.sites)


def describe_order(
    title: str,
    tasks: Sequence[Task],
    order: OrderEstimate,
    nodes: Mapping[str, Node],
    sites: Sequence[UlyssesSite],
) -> dict[str, Any]:
    """Returns a program in one order: its tasks by columns, and who was busy with which when."""
    place = {task.name: index for index, task in enumerate(tasks)}
    timeline = order.timeline
    started = {span.name: span.end_s for span in timeline.spans if span.kind == "start"}
    return {
        "title": title,
        "step_ns": _ns(timeline.step_s),
        "compute_ns": _ns(timeline.compute_s),
        "exposed_ns": _ns(timeline.exposed_s),
        "in_flight_ns": _ns(timeline.in_flight_s),
        "lanes": timeline.lanes,
        "spans": _spans(timeline, place),
        "tasks": {**_tasks(tasks, nodes), "role": _roles(tasks, sites)},
        "exchanges": [
            {
                "task": place[item.span.name],
                "begin_ns": _ns(item.span.begin_s),
                "end_ns": _ns(item.span.end_s),
                "queued_ns": _ns(
                    item.span.begin_s - started.get(item.span.name, item.span.begin_s)
                ),
                "exposed_ns": _ns(item.exposed_s),
                "behind": [place[name] for name in item.behind],
            }
            for item in order.exchanges
        ],
    }


def _spans(timeline: Timeline, place: Mapping[str, int]) -> dict[str, list[Any]]:
    lanes = {lane: index for index, lane in enumerate(timeline.lanes)}
    ordered = sorted(timeline.spans, key=lambda span: (lanes[span.lane], span.begin_s))
    return {
        "lane": [lanes[span.lane] for span in ordered],
        "kind": [span.kind for span in ordered],
        "at": [_ns(span.begin_s) for span in ordered],
        "for": [_ns(span.seconds) for span in ordered],
        "task": [place[span.name] for span in ordered],
    }


def _tasks(tasks: Sequence[Task], nodes: Mapping[str, Node]) -> dict[str, list[Any]]:
    modules: dict[str, str] = {}
    own = [nodes[task.name] for task in tasks]
    return {
        "name": [task.name for task in tasks],
        "op": [op_name(node.target) for node in own],
        "module": [module_of(node, modules) for node in own],
        "value": [value_text(node) for node in own],
        "site": [task.site for task in tasks],
        "bytes": [task.size_bytes for task in tasks],
        "own_ns": [_ns(max(task.seconds, task.exchange_s)) for task in tasks],
        "light_ns": [_ns(task.light_s) for task in tasks],
        "of": [task.needs[0] if task.kind == "wait" and task.needs else -1 for task in tasks],
    }


def _roles(tasks: Sequence[Task], sites: Iterable[UlyssesSite]) -> list[str]:
    """Returns what each task sends or waits for: `Q, K`, `O`; nothing for all else."""
    roles: dict[str, dict[str, None]] = {}
    for site in sites:
        for leg in site.legs:
            for piece in leg.exchange.pieces:
                for start in (piece.start, *(phase.start for phase in piece.phases)):
                    roles.setdefault(start.name, {})[leg.role.upper()] = None
    started = [
        tasks[task.needs[0]] if task.kind == "wait" and task.needs else task for task in tasks
    ]
    return [", ".join(roles.get(task.name, ())) for task in started]


def _ns(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)


def _machines(report: PipelineReport, machines: Mapping[str, Machine]) -> list[dict[str, Any]]:
    """Returns the machine under each Ulysses group, and in which phases exchanges run on it."""
    pieces = [piece for site in report.recognition.sites for piece in site.pieces]
    counts = Counter((piece.group, optimization_hint(piece.size_bytes)) for piece in pieces)
    return [
        {
            "group": group,
            "topology": topology_data(machine.topology),
            "axes": list(machine.topology.axis_names),
            "num_ranks": machine.topology.num_ranks,
            "is_measured": bool(machine.topology.measured),
            "phases": [
                _phases(item, machine.topology, counts[group, item.size_bytes])
                for item in report.decision.phases
                if item.group == number
            ],
        }
        for number, (group, machine) in enumerate(machines.items())
    ]


def _phases(item: ExchangePhases, topology: Topology, count: int) -> dict[str, Any]:
    size, places = item.size_bytes, {name: at for at, name in enumerate(topology.axis_names)}
    return {
        "name": format_phases(item.phases),
        "size_bytes": size,
        "count": count,
        "seconds": exchange_seconds(topology, item.phases, size),
        "flat_s": exchange_seconds(topology, (topology.axis_names,), size),
        "phases": [
            {
                "axes": list(axes),
                "seconds": phase_seconds(topology, axes, size),
                "outermost": max(places[name] for name in axes),
            }
            for axes in item.phases
        ],
    }


def _versions() -> dict[str, str]:
    return {
        "cocodiff-compile": CompileConfig().settings["the version of cocodiff-compile"],
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _options(config: CompileConfig) -> dict[str, dict[str, Any]]:
    """Returns each option as text, and whether it is the default."""
    usual = CompileConfig()
    return {
        item.name: {
            "value": _shown(getattr(config, item.name)),
            "is_default": getattr(config, item.name) == getattr(usual, item.name),
        }
        for item in fields(CompileConfig)
    }


def _shown(value: object) -> str:
    if isinstance(value, Topology):
        return f"{value.name} ({value.num_ranks} ranks)"
    text = repr(value) if not isinstance(value, (str, bool, type(None))) else str(value)
    return text if len(text) < 400 else f"{text[:400]}..."
