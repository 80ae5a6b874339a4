"""The machine under a Ulysses group, and this rank's process groups along its axes.

Groups are made while a graph is compiled, before any pass, in the same order on every rank, and
only by their own members, so that Ulysses may run on a part of the world. A group that exists is
used again, whoever asks for it; all of them go with the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cocodiff_compile.agreement.world import PerWorld
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phase_plan import all_phases


@dataclass(frozen=True)
class Machine:
    """The topology under one Ulysses group, and the name of this rank's group per set of axes.

    Axes of a set are in the order of the topology, as in a phase of a plan.
    """

    topology: Topology
    groups: Mapping[tuple[str, ...], str]

    @property
    def message_order(self) -> tuple[str, ...]:
        """Axis names, outermost first: as the flat exchange orders its messages."""
        return self.topology.axis_names[::-1]


_made: PerWorld[dict[tuple[int, ...], Any]] = PerWorld(dict)
"""The process groups made here, by their members."""


def axis_sets(topology: Topology) -> list[tuple[str, ...]]:
    """Every set of axes that a phase of some plan runs along, in order; the flat one is first."""
    return list(dict.fromkeys(axes for phases in all_phases(topology) for axes in phases))


def sketch_machine(topology: Topology) -> Machine:
    """A machine to look at plans with: its groups have names, and do not exist."""
    return Machine(topology, {axes: "+".join(axes) for axes in axis_sets(topology)[1:]})


def make_machine(ranks: tuple[int, ...], topology: Topology) -> Machine:
    """The machine under the Ulysses group of `ranks`. All of them call this at the same time."""
    groups = make_groups(ranks, topology, axis_sets(topology)[1:])
    return Machine(topology, {axes: group.group_name for axes, group in groups.items()})


def make_groups(
    ranks: tuple[int, ...], topology: Topology, wanted: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], Any]:
    """This rank's process group for every wanted set of axes."""
    topology.for_ranks(len(ranks))
    place = ranks.index(dist.get_rank())
    return {
        axes: _group_of(tuple(ranks[other] for other in topology.ranks_along(place, axes)))
        for axes in wanted
    }


def forget_groups() -> None:
    """Makes new groups from now on: a collective that timed out leaves its group unusable."""
    _made.forget()


def _group_of(members: tuple[int, ...]) -> Any:
    known = _made.get()
    if members not in known:
        known[members] = dist.new_group(list(members), use_local_synchronization=True)
    return known[members]
