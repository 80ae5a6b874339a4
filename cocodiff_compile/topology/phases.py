"""All ways to run an exchange in phases along the axes of a machine.

A plan is a sequence of phases, a phase is a set of axes that are exchanged at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from cocodiff_compile.topology.axes import Topology

MAX_PHASES = 3

Phases: TypeAlias = "tuple[tuple[str, ...], ...]"


def format_phases(phases: Sequence[Sequence[str]]) -> str:
    """`tile | gpu+node`; `flat` for an exchange that is not parted."""
    return " | ".join(map("+".join, phases)) if len(phases) > 1 else "flat"


def all_phases(topology: Topology) -> list[Phases]:
    """Flat first, then every ordered way to put the axes into 2 or 3 phases, inner axes early."""
    names = topology.axis_names
    found: list[Phases] = [(names,)]
    for count in range(2, min(MAX_PHASES, len(names)) + 1):
        found += _ordered_partitions(names, count)
    return found


def _ordered_partitions(names: tuple[str, ...], count: int) -> Iterator[Phases]:
    """Each name into one of `count` phases, none of them empty; names keep their order inside."""
    for places in itertools.product(range(count), repeat=len(names)):
        if len(set(places)) == count:
            yield tuple(
                tuple(name for name, place in zip(names, places, strict=True) if place == phase)
                for phase in range(count)
            )


def axis_sets(topology: Topology) -> list[tuple[str, ...]]:
    """Every set of axes that a phase of some plan runs along, in order; the flat one is first."""
    return list(dict.fromkeys(axes for phases in all_phases(topology) for axes in phases))
