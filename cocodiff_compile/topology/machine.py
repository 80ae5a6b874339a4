# SPDX-License-Identifier: Apache-2.0
"""Describes the machine under a Ulysses group: its topology, and its process groups by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import axis_sets


@dataclass(frozen=True)
class Machine:
    """Holds the topology under one Ulysses group, and the name of this rank's group per set of
    axes.

    Axes of a set are in the order of the topology, as in a phase of a plan.
    """

    topology: Topology
    groups: Mapping[tuple[str, ...], str]

    @property
    def message_order(self) -> tuple[str, ...]:
        """Axis names, outermost first, in which order the flat exchange arranges its messages."""
        return self.topology.axis_names[::-1]


def sketch_machine(topology: Topology) -> Machine:
    """Returns a machine for planning only: its groups have names, and do not exist."""
    return Machine(topology, {axes: "+".join(axes) for axes in axis_sets(topology)[1:]})
