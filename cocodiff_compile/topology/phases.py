# SPDX-License-Identifier: Apache-2.0
"""Enumerates the plans to run an exchange in phases along the axes of a machine.

A plan is a sequence of phases; a phase is a set of axes that are exchanged at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from cocodiff_compile.topology.axes import Topology

MAX_PHASES = 3

Phases: TypeAlias = "tuple[tuple[str, ...], ...]"


def format_phases(phases: Sequence[Sequence[str]]) -> str:
    """Returns `tile | gpu+node`, or `flat` for an exchange with a single phase."""
    return " | ".join(map("+".join, phases)) if len(phases) > 1 else "flat"


def all_phases(topology: Topology) -> list[Phases]:
    """Returns all plans: the flat one, then ordered partitions into 2 or 3, inner axes early."""
    names = topology.axis_names
    plans: list[Phases] = [(names,)]
    for count in range(2, min(MAX_PHASES, len(names)) + 1):
        plans += _ordered_partitions(names, count)
    return plans


def _ordered_partitions(names: tuple[str, ...], count: int) -> Iterator[Phases]:
    """Yields all assignments of the names to `count` phases, none empty, names in their order."""
    for phase_of in itertools.product(range(count), repeat=len(names)):
        if len(set(phase_of)) == count:
            yield tuple(
                tuple(name for name, its in zip(names, phase_of, strict=True) if its == phase)
                for phase in range(count)
            )


def axis_sets(topology: Topology) -> list[tuple[str, ...]]:
    """Returns every set of axes that a phase of some plan runs along, the flat one first."""
    return list(dict.fromkeys(axes for phases in all_phases(topology) for axes in phases))
