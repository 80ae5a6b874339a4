# SPDX-License-Identifier: Apache-2.0
"""Turns one rank's step into tasks of the compiler's cost model.

A compiled graph becomes the tasks by which the compiler schedules it, in the order of its nodes; a
graph of eager calls becomes a task per call. The compiler's clock runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.fx import Graph

from cocodiff_compile.cost.clock import run_in_order
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cost.tasks import Task, captured_order
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.devices.device import Device
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, bound
from cocodiff_compile.ir.collectives import collectives_by_group, is_collective
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.schedule.graph_tasks import eager_tasks, graph_tasks, unneeded_seconds
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.machine import sketch_machine


@dataclass(frozen=True)
class Sent:
    """One collective along `axes`: what one rank hands over, its own part included."""

    axes: tuple[str, ...]
    size_bytes: int
    is_all_to_all: bool


@dataclass(frozen=True)
class Program:
    """Tasks in the order in which they run."""

    tasks: tuple[Task, ...]
    sent: tuple[Sent, ...] = ()

    def timeline(self) -> Timeline:
        return run_in_order(self.tasks, captured_order(self.tasks)).timeline


def simulated_costs(device: Device, topology: Topology, graphs: Iterable[Graph]) -> Costs:
    """Returns the costs on a machine for graphs of one Ulysses group. Groups made for phases are
    named by their axes; any other is the whole Ulysses group.
    """
    machine = sketch_machine(topology)
    groups = {name: None for graph in graphs for name in collectives_by_group(graph)}
    whole = [name for name in groups if name not in machine.groups.values()] or [topology.name]
    return Costs(device, dict.fromkeys(whole, machine), tapa="off")


def graph_program(graph: Graph, costs: Costs) -> Program:
    """Returns the program of a compiled graph. Raises InvariantError for unknown collectives."""
    tasks = graph_tasks(graph, Recognition(), costs).tasks
    last = Task("results", "compute", (), light_s=unneeded_seconds(graph, costs))
    return Program((*tasks, last), _sent(graph, costs))


def eager_program(graph: Graph, costs: Costs) -> Program:
    """Returns the program of calls that run one by one. Raises as `graph_program` does."""
    return Program(eager_tasks(graph, costs), _sent(graph, costs))


def joined(programs: Iterable[Program]) -> Program:
    """Returns the programs one after the other."""
    tasks: list[Task] = []
    sent: list[Sent] = []
    for program in programs:
        first = len(tasks)
        for task in program.tasks:
            needs, borrows = (tuple(first + n for n in of) for of in (task.needs, task.borrows))
            tasks.append(replace(task, needs=needs, borrows=borrows))
        sent += program.sent
    return Program(tuple(tasks), tuple(sent))


def _sent(graph: Graph, costs: Costs) -> tuple[Sent, ...]:
    sent = []
    for start in filter(is_collective, graph.nodes):
        route = costs.route(str(bound(start)["group_name"]))
        if start.target not in (ALL_TO_ALL, ALL_GATHER) or route is None:
            raise InvariantError(f"simulate: {start.name} is {start.target}, of unknown cost")
        sent.append(Sent(route[1], costs.sent_bytes(start), start.target is ALL_TO_ALL))
    return tuple(sent)
