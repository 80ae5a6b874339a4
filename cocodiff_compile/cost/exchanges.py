# SPDX-License-Identifier: Apache-2.0
"""Estimates an all-to-all along some axes of a machine: the only file that says how long exchanges
take and how ranks share links. Pure functions of numbers.

Every rank of a phase sends `size_bytes / ranks` to each other rank of it. A message passes
the link of the outermost axis on which the two ranks differ. Per link class

    time = messages * latency + bytes / bandwidth

with the bandwidth one rank gets while all talk both ways: half of `both_ways`, at most `one way`,
divided by the ranks that share the link. Link classes work side by side, latencies add up. A phase
that crosses a link while its inner neighbours talk to different partners is unaligned
(`Link.unaligned_from_bytes`).

Where a phase was measured on the live machine (`Topology.measured`), that counts instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cocodiff_compile.topology.axes import Link, Topology
from cocodiff_compile.topology.measured_phase import IN_FLIGHT


@dataclass(frozen=True)
class Traffic:
    """Describes what one rank sends over one link class in one phase."""

    link: Link
    messages: int
    size_bytes: float


def traffic(topology: Topology, phase: Sequence[str], size_bytes: float) -> list[Traffic]:
    """Returns messages and bytes of one rank per link class, in a phase along the named axes."""
    axes = [axis for axis in topology.axes if axis.name in phase]
    message_bytes = size_bytes / math.prod(axis.size for axis in axes)
    messages: dict[Link, int] = {}
    inner = 1
    for axis in axes:
        messages[axis.link] = messages.get(axis.link, 0) + (axis.size - 1) * inner
        inner *= axis.size
    return [Traffic(link, count, count * message_bytes) for link, count in messages.items()]


def phase_seconds(topology: Topology, phase: Sequence[str], size_bytes: float) -> float:
    """Returns the time of one phase, all ranks at once: as measured, else by the links."""
    if measured := topology.measured_along(phase, size_bytes):
        return measured.seconds(size_bytes)
    flows = traffic(topology, phase, size_bytes)
    waiting = sum(flow.messages * flow.link.latency_s for flow in flows)
    moving = (
        flow.size_bytes / _bandwidth(flow.link) * _slowdown(topology, phase, flow.link, size_bytes)
        for flow in flows
    )
    return waiting + max(moving, default=0.0)


def alone_seconds(topology: Topology, phase: Sequence[str], size_bytes: float) -> float:
    """Returns the time of one phase, by a measurement of whatever size if there is one."""
    if measured := topology.measured_along(phase, size_bytes, any_size=True):
        return measured.seconds(size_bytes)
    return phase_seconds(topology, phase, size_bytes)


def busy_seconds(topology: Topology, phase: Sequence[str], size_bytes: float) -> float:
    """Returns how long a phase keeps its links from others, which may be less than it takes."""
    if measured := topology.measured_along(phase, size_bytes, IN_FLIGHT, any_size=True):
        return measured.seconds(size_bytes)
    return alone_seconds(topology, phase, size_bytes)


def exchange_seconds(
    topology: Topology, phases: Sequence[Sequence[str]], size_bytes: float
) -> float:
    """Returns the time of an exchange in phases; each one after the first costs one more copy."""
    copies = (len(phases) - 1) * copy_seconds(topology, size_bytes)
    return copies + sum(phase_seconds(topology, phase, size_bytes) for phase in phases)


def copy_seconds(topology: Topology, size_bytes: float) -> float:
    """Returns the time to put a buffer into another order before and after a phase."""
    if measured := topology.measured_along((), size_bytes):
        return measured.seconds(size_bytes)
    return 2 * size_bytes / topology.copy_bytes_per_s


def is_measured(topology: Topology, phases: Sequence[Sequence[str]], size_bytes: float) -> bool:
    """Returns whether all of an exchange in these phases was measured, its copies included."""
    parts = [*phases, ()] if len(phases) > 1 else phases
    return all(topology.measured_along(part, size_bytes) for part in parts)


def messages_per_exchange(topology: Topology, phases: Sequence[Sequence[str]]) -> int:
    """Returns the number of messages of all ranks together, over all phases."""
    per_rank = sum(
        flow.messages for phase in phases for flow in traffic(topology, phase, size_bytes=0)
    )
    return topology.num_ranks * per_rank


def _bandwidth(link: Link) -> float:
    return min(link.bytes_per_s, link.both_ways_bytes_per_s / 2) / link.ranks_per_link


def _slowdown(topology: Topology, phase: Sequence[str], link: Link, size_bytes: float) -> float:
    begin = link.unaligned_from_bytes
    inner = itertools.takewhile(lambda axis: axis.link != link, topology.axes)
    if begin is None or not any(axis.name in phase for axis in inner):
        return 1.0
    return 1.0 + math.log2(max(1.0, size_bytes / begin))
