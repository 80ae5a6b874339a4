# SPDX-License-Identifier: Apache-2.0
"""Says what ops and collectives cost where a graph will run, the same numbers on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from cocodiff_compile.cost.exchanges import alone_seconds, busy_seconds, copy_seconds, traffic
from cocodiff_compile.cost.ops import hinted_bytes
from cocodiff_compile.cost.phase_plan import plan_phases
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.aten import ALL_GATHER, bound
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import Phases


@dataclass(frozen=True)
class ExchangeCost:
    """States how long a collective takes alone, and how long it keeps which links busy."""

    seconds: float
    busy_s: float
    links: tuple[str, ...]


@dataclass(frozen=True)
class Costs:
    """`machines` holds the machine under each Ulysses group, by the group's name."""

    device: Device
    machines: Mapping[str, Machine]
    tapa: Literal["auto", "on", "off"]
    sent_share: float = 1.0
    """The part of what an exchange carries that will be sent."""

    def exchange(self, start: Node) -> ExchangeCost:
        """Returns the cost of the collective that `start` starts."""
        group, size_bytes = str(bound(start)["group_name"]), self.sent_bytes(start)
        if route := self.route(group):
            name, axes = route
            return _cost(name, self.machines[name].topology, (axes,), size_bytes)
        seconds = self.device.memory_seconds(size_bytes)
        return ExchangeCost(seconds, seconds, (group,))

    def sent_bytes(self, start: Node) -> int:
        """Returns how much each rank hands over in a collective, its own part included."""
        size_bytes = int(hinted_bytes(start.all_input_nodes[0]) * self.sent_share)
        if start.target is ALL_GATHER:
            size_bytes *= int(bound(start)["group_size"])
        return size_bytes

    def route(self, group: str) -> tuple[str, tuple[str, ...]] | None:
        """Returns the Ulysses group whose machine `group` runs on, and its axes; None if none."""
        for name, machine in self.machines.items():
            axes_of = {own: axes for axes, own in machine.groups.items()}
            axes = machine.topology.axis_names if group == name else axes_of.get(group)
            if axes is not None:
                return name, axes
        return None

    def planned(self, group: str, size_bytes: int) -> ExchangeCost:
        """Returns the cost of an exchange over a whole Ulysses group, in the phases it will get."""
        size_bytes = int(size_bytes * self.sent_share)
        topology = self.machines[group].topology
        phases = plan_phases(topology, size_bytes, self.tapa).phases
        return _cost(group, topology, phases, size_bytes)


def _cost(name: str, topology: Topology, phases: Phases, size_bytes: int) -> ExchangeCost:
    copies_s = (len(phases) - 1) * copy_seconds(topology, size_bytes)
    alone_s = copies_s + sum(alone_seconds(topology, phase, size_bytes) for phase in phases)
    busy_s = sum(busy_seconds(topology, phase, size_bytes) for phase in phases)
    links = {
        flow.link.name: None for phase in phases for flow in traffic(topology, phase, size_bytes)
    }
    return ExchangeCost(
        max(busy_s, alone_s),
        busy_s,
        tuple(f"{name} {link}" for link in links),
    )
