"""`auto` over the default process group: detect, then measure or take from the cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed as dist

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology import probe_cache
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.detect import RankPlace, detect, place_of_this_rank
from cocodiff_compile.topology.phase_plan import all_phases
from cocodiff_compile.topology.probe import probe

T = TypeVar("T")


@dataclass(frozen=True)
class LiveTopology:
    """What all ranks found, the rank that asks, and what a user should know, as sentences."""

    rank: int
    topology: Topology
    notes: tuple[str, ...]


def live_topology_under_torchrun() -> LiveTopology:
    """Brings up gloo from torchrun's variables, for the `cocodiff topology auto` command."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise UserError(
            "'auto' detects and measures live ranks; start them: "
            "torchrun --nproc-per-node 4 -m cocodiff_compile.cli topology auto"
        )
    dist.init_process_group("gloo")
    try:
        return live_topology(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def live_topology(device: torch.device, budget_s: float = 2.0) -> LiveTopology:
    """Called by all ranks of the default group; the same topology on each."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks < 2:
        raise UserError("'auto' needs two ranks or more; the group has 1")
    places: list[RankPlace] = [RankPlace("")] * num_ranks
    dist.all_gather_object(places, place_of_this_rank(device))
    detected = detect(places)
    topology, note = _measured(detected.topology, places, device, budget_s)
    return LiveTopology(rank, topology, (*detected.reasons, note))


def _measured(
    topology: Topology, places: Sequence[RankPlace], device: torch.device, budget_s: float
) -> tuple[Topology, str]:
    if not probe_cache.probe_wanted():
        return topology, f"not measured: {probe_cache.PROBE_VARIABLE}=0"
    key = probe_cache.cache_key(topology, places, dist.get_backend())
    kept = _from_first_rank(probe_cache.load(key) if dist.get_rank() == 0 else None)
    if kept:
        return kept, f"measured before; delete {probe_cache.file_of(key)} to measure anew"
    probed = probe(groups_by_axes(topology), topology, device, budget_s)
    # A collective may end well on one rank and not on another: the first rank's result counts.
    probed = _from_first_rank(probed)
    if probed.reason is None and dist.get_rank() == 0:
        probe_cache.save(key, probed.topology)
    return probed.topology, probed.reason or f"measured now, kept in {probe_cache.file_of(key)}"


def _from_first_rank(value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def groups_by_axes(topology: Topology) -> dict[frozenset[str], dist.ProcessGroup]:
    """This rank's group for every phase of every plan, over the ranks of the default group."""
    phases = [phase for phases in all_phases(topology) for phase in phases]
    mine: dict[frozenset[str], dist.ProcessGroup] = {}
    for phase in dict.fromkeys(phases):
        for ranks in dict.fromkeys(
            topology.ranks_along(rank, phase) for rank in range(topology.num_ranks)
        ):
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine[frozenset(phase)] = group
    return mine
