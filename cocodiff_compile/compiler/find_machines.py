# SPDX-License-Identifier: Apache-2.0
"""Finds the machine under each Ulysses group of a graph, as the option `topology` says."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cocodiff_compile.compat import find_group, outside_the_compiler
from cocodiff_compile.ir.aten import value_of
from cocodiff_compile.ir.records import Exchange, Recognition
from cocodiff_compile.ranks.agreement.watch import watched
from cocodiff_compile.ranks.agreement.world import PerWorld, ranks_are_real
from cocodiff_compile.ranks.detect import RankLocation, detect
from cocodiff_compile.ranks.groups import make_machine
from cocodiff_compile.ranks.live_topology import live_topology
from cocodiff_compile.say_once import say_once
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.machine import Machine, sketch_machine
from cocodiff_compile.topology.presets import PRESETS

log = logging.getLogger(__name__)

_found: PerWorld[dict[tuple[int, ...], Topology]] = PerWorld(dict)
"""What `auto` found under a group of ranks: one that compiles again, alone, must not ask."""


def find_machines(
    recognition: Recognition, source: str | Topology | Sequence[Topology], dry_run: bool
) -> dict[str, Machine]:
    """Returns the machine under each group, by the group's name; `source` is one for all groups, or
    one for each. On a live group all ranks call this at the same time; a dry run sees a measured
    machine once a live compile has measured it.
    """
    groups = {item.group: item for site in recognition.sites for item in site.exchanges}
    sources: Sequence[str | Topology]
    sources = [source] * len(groups) if isinstance(source, (str, Topology)) else source
    return {
        name: _machine(exchange, own, dry_run)
        for (name, exchange), own in zip(groups.items(), sources, strict=True)
    }


def _machine(exchange: Exchange, source: str | Topology, dry_run: bool) -> Machine:
    if isinstance(source, Topology):
        topology = source.for_ranks(exchange.num_ranks)
    elif source == "auto":
        topology = _auto(exchange, dry_run)
    else:
        topology = PRESETS[source](exchange.num_ranks)
    if dry_run:
        return sketch_machine(topology)
    with outside_the_compiler(), watched(exchange.ranks):
        return make_machine(exchange.ranks, topology)


def _auto(exchange: Exchange, dry_run: bool) -> Topology:
    known = _found.get()
    if exchange.ranks not in known:
        if dry_run or not ranks_are_real():
            return detect([RankLocation("")] * exchange.num_ranks).topology
        with outside_the_compiler(), watched(exchange.ranks):
            device = value_of(exchange.start).device
            found = live_topology(device, find_group(exchange.group))
        level = logging.WARNING if found.probe_failed else logging.INFO
        for note in found.notes:
            say_once(log, level, f"topology of ranks {list(exchange.ranks)}: {note}")
        known[exchange.ranks] = found.topology
    return known[exchange.ranks]


def forget_machines() -> None:
    """`auto` looks and measures again from now on: for links that were changed meanwhile."""
    _found.clear()
