# SPDX-License-Identifier: Apache-2.0
"""Finds the topology of a live group: detects it, then measures it or reads it from the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks import probe_cache
from cocodiff_compile.ranks.agreement.all_ranks import from_first_rank, gathered
from cocodiff_compile.ranks.detect import detect, location_of_this_rank
from cocodiff_compile.ranks.groups import forget_groups, make_groups
from cocodiff_compile.ranks.launch.init_distributed import init_distributed
from cocodiff_compile.ranks.launch.launchers import find_launch
from cocodiff_compile.ranks.probe import probe
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import axis_sets


@dataclass(frozen=True)
class LiveTopology:
    """Holds the topology that all ranks found, the rank that asks, and notes for the user."""

    rank: int
    topology: Topology
    notes: tuple[str, ...]
    probe_failed: bool = False
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
    """Returns the same topology on each rank of the group, by default the world; all call this."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(ranks) < 2:
        raise UserError("'auto' needs two ranks or more; the group has 1")
    own, is_first = dist.get_rank(), dist.get_rank() == ranks[0]
    locations = gathered(location_of_this_rank(device), group)
    detected = detect(locations)
    topology, reasons = detected.topology, detected.reasons
    if not probe_cache.probe_wanted():
        note = f"not measured: {probe_cache.PROBE_VARIABLE}=0"
        return LiveTopology(own, topology, (*reasons, note))
    key = probe_cache.cache_key(topology, locations, dist.get_backend(group))
    cached = from_first_rank(probe_cache.load(key, topology) if is_first else None, group)
    if cached:
        note = f"measured before; delete {probe_cache.describe_file(key)} to measure again"
        return LiveTopology(own, cached, (*reasons, note))
    # Over groups of their own, since the user's groups must survive a failure here.
    groups = make_groups(ranks, topology, axis_sets(topology))
    # A collective may succeed on one rank and fail on another: the first rank's result counts.
    probed = from_first_rank(probe(groups, topology, device, budget_s), group)
    if not probed.topology.measured:
        forget_groups()
    if probed.reason is not None:
        return LiveTopology(own, probed.topology, (*reasons, probed.reason), probe_failed=True)
    if is_first:
        probe_cache.save(key, probed.topology)
    note = f"measured now, saved in {probe_cache.describe_file(key)}"
    return LiveTopology(own, probed.topology, (*reasons, note))
