"""Finds the topology of a live process group: detects it, then measures it or reads it from the
cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks import probe_cache
from cocodiff_compile.ranks.agreement.all_ranks import from_first_rank, gathered
from cocodiff_compile.ranks.detect import RankLocation, detect, location_of_this_rank
from cocodiff_compile.ranks.groups import forget_groups, make_groups
from cocodiff_compile.ranks.launch.init_distributed import init_distributed
from cocodiff_compile.ranks.launch.launchers import find_launch
from cocodiff_compile.ranks.probe import Probed, probe
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import axis_sets


@dataclass(frozen=True)
class LiveTopology:
    """Holds the topology that all ranks found, the rank that asks, and notes for the user."""

    rank: int
    topology: Topology
    notes: tuple[str, ...]
    probe_failed: bool
    """Whether the ranks tried to measure and could not."""


def live_topology_under_launcher() -> LiveTopology:
    """Joins the launched ranks, for the command `cocodiff topology auto`."""
    if find_launch(os.environ) is None:
        raise UserError(
            "'auto' detects and measures live ranks; start them with: "
            "torchrun --nproc-per-node 4 -m cocodiff_compile.cli topology auto"
        )
    device = init_distributed()
    try:
        return live_topology(device)
    finally:
        dist.destroy_process_group()


def live_topology(device: torch.device, group: Any = None, budget_s: float = 2.0) -> LiveTopology:
    """Returns the same topology on each rank. All ranks of the group, by default the world, must
    call this.
    """
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(ranks) < 2:
        raise UserError("'auto' needs two ranks or more; the group has 1")
    locations = gathered(location_of_this_rank(device), group)
    detected = detect(locations)
    live = _Live(ranks, group, device, budget_s)
    measured = live.measured(detected.topology, locations)
    notes = (*detected.reasons, measured.note)
    return LiveTopology(dist.get_rank(), measured.topology, notes, measured.probe_failed)


@dataclass(frozen=True)
class _Measured:
    """Holds a topology, and a sentence about where its measurements come from or why it has
    none.
    """

    topology: Topology
    note: str
    probe_failed: bool = False


@dataclass(frozen=True)
class _Live:
    ranks: tuple[int, ...]
    group: Any
    device: torch.device
    budget_s: float

    def measured(self, topology: Topology, locations: Sequence[RankLocation]) -> _Measured:
        """Returns the topology with measurements, from the cache or new."""
        if not probe_cache.probe_wanted():
            return _Measured(topology, f"not measured: {probe_cache.PROBE_VARIABLE}=0")
        key = probe_cache.cache_key(topology, locations, dist.get_backend(self.group))
        cached = from_first_rank(
            probe_cache.load(key, topology) if self._is_first else None, self.group
        )
        if cached:
            note = f"measured before; delete {probe_cache.describe_file(key)} to measure again"
            return _Measured(cached, note)
        probed = self._probe(topology)
        if probed.reason is not None:
            return _Measured(probed.topology, probed.reason, probe_failed=True)
        if self._is_first:
            probe_cache.save(key, probed.topology)
        return _Measured(
            probed.topology, f"measured now, saved in {probe_cache.describe_file(key)}"
        )

    def _probe(self, topology: Topology) -> Probed:
        """Measures over groups of its own, since the user's groups must survive a failure here."""
        groups = make_groups(self.ranks, topology, axis_sets(topology))
        # A collective may succeed on one rank and fail on another: the first rank's result counts.
        probed = from_first_rank(probe(groups, topology, self.device, self.budget_s), self.group)
        if not probed.topology.measured:
            forget_groups()
        return probed

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]
