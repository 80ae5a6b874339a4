# SPDX-License-Identifier: Apache-2.0
"""Makes this rank's process groups along the axes of the machine under a Ulysses group.

Groups are made while a graph is compiled, before any pass, in the same order on every rank, and
only by their own members, so that Ulysses may run on a part of the world. An existing group is
reused, and all groups end with the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from cocodiff_compile.ranks.agreement.world import PerWorld
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import axis_sets

_made: PerWorld[dict[tuple[int, ...], Any]] = PerWorld(dict)
"""The process groups made here, by their members."""


def make_machine(ranks: tuple[int, ...], topology: Topology) -> Machine:
    """Returns the machine under the Ulysses group of `ranks`, all of which call this at once."""
    groups = make_groups(ranks, topology, axis_sets(topology)[1:])
    return Machine(topology, {axes: group.group_name for axes, group in groups.items()})


def make_groups(
    ranks: tuple[int, ...], topology: Topology, wanted: Sequence[tuple[str, ...]]
) -> dict[tuple[str, ...], Any]:
    """Returns this rank's process group for every wanted set of axes."""
    topology.for_ranks(len(ranks))
    own = ranks.index(dist.get_rank())
    return {
        axes: group_of(tuple(ranks[other] for other in topology.ranks_along(own, axes)))
        for axes in wanted
    }


def forget_groups() -> None:
    """Makes later calls create new groups: a collective that timed out breaks its group."""
    _made.clear()


def group_of(members: tuple[int, ...]) -> Any:
    """Returns the process group of these ranks, all of which call this at once."""
    known = _made.get()
    if members not in known:
        known[members] = dist.new_group(list(members), use_local_synchronization=True)
    return known[members]
