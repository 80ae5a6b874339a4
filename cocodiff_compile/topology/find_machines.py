"""From the option `topology` to the machine under each Ulysses group of a graph."""

from __future__ import annotations

import socket
from typing import Any

from cocodiff_compile.agreement.compile_rounds import CompileRounds
from cocodiff_compile.agreement.failures import ranks_are_real
from cocodiff_compile.graph.records import Recognition
from cocodiff_compile.topology.groups import Machine, make_machine, sketch_machine
from cocodiff_compile.topology.show import find_topology


def describe_this_rank() -> dict[str, Any]:
    """What the ranks of a group must know of each other to find their machine."""
    return {"host": socket.gethostname()}


def find_machines(
    found: Recognition, source: str, rounds: CompileRounds | None, live: bool
) -> dict[str, Machine]:
    """By the name of the group. On a live group all ranks call this at the same time."""
    groups = {item.group: item.ranks for site in found.sites for item in site.exchanges}
    machines = {}
    for name, ranks in groups.items():
        topology = find_topology("flat" if source == "auto" else source, len(ranks))
        make = live or not ranks_are_real()
        machines[name] = make_machine(ranks, topology) if make else sketch_machine(topology)
    return machines
