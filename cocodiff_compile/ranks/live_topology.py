"""`auto` over a live process group: detect, then measure or take from the cache."""

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
from cocodiff_compile.ranks.detect import RankPlace, detect, place_of_this_rank
from cocodiff_compile.ranks.groups import forget_groups, make_groups
from cocodiff_compile.ranks.launch.init_distributed import init_distributed
from cocodiff_compile.ranks.launch.launchers import find_launch
from cocodiff_compile.ranks.probe import Probed, probe
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import axis_sets


@dataclass(frozen=True)
class LiveTopology:
    """What all ranks found, the rank that asks, and what a user should know, as sentences."""

    rank: int
    topology: Topology
    notes: tuple[str, ...]
    probe_failed: bool
    """The ranks tried to measure and could not."""


def live_topology_under_launcher() -> LiveTopology:
    """Joins the ranks that were started, for the `cocodiff topology auto` command."""
    if find_launch(os.environ) is None:
        raise UserError(
            "'auto' detects and measures live ranks; start them: "
            "torchrun --nproc-per-node 4 -m cocodiff_compile.cli topology auto"
        )
    device = init_distributed()
    try:
        return live_topology(device)
    finally:
        dist.destroy_process_group()


def live_topology(device: torch.device, group: Any = None, budget_s: float = 2.0) -> LiveTopology:
    """Called by all ranks of a group, the world by default; the same topology on each."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(ranks) < 2:
        raise UserError("'auto' needs two ranks or more; the group has 1")
    places = gathered(place_of_this_rank(device), group)
    detected = detect(places)
    live = _Live(ranks, group, device, budget_s)
    found = live.measured(detected.topology, places)
    notes = (*detected.reasons, found.note)
    return LiveTopology(dist.get_rank(), found.topology, notes, found.probe_failed)


@dataclass(frozen=True)
class _Measured:
    """A topology, and in a sentence where its measurements come from or why it has none."""

    topology: Topology
    note: str
    probe_failed: bool = False


@dataclass(frozen=True)
class _Live:
    ranks: tuple[int, ...]
    group: Any
    device: torch.device
    budget_s: float

    def measured(self, topology: Topology, places: Sequence[RankPlace]) -> _Measured:
        """The topology with measurements, from the cache or new, where there is a choice."""
        if not probe_cache.probe_wanted():
            return _Measured(topology, f"not measured: {probe_cache.PROBE_VARIABLE}=0")
        key = probe_cache.cache_key(topology, places, dist.get_backend(self.group))
        kept = from_first_rank(
            probe_cache.load(key, topology) if self._is_first else None, self.group
        )
        if kept:
            note = f"measured before; delete {probe_cache.place_of(key)} to measure anew"
            return _Measured(kept, note)
        probed = self._probe(topology)
        if probed.reason is not None:
            return _Measured(probed.topology, probed.reason, probe_failed=True)
        if self._is_first:
            probe_cache.save(key, probed.topology)
        return _Measured(probed.topology, f"measured now, kept in {probe_cache.place_of(key)}")

    def _probe(self, topology: Topology) -> Probed:
        """Over groups of its own: the user's must survive what happens here."""
        groups = make_groups(self.ranks, topology, axis_sets(topology))
        # A collective may end well on one rank and not on another: the first rank's result counts.
        probed = from_first_rank(probe(groups, topology, self.device, self.budget_s), self.group)
        if not probed.topology.measured:
            forget_groups()
        return probed

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]
