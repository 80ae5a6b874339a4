"""Which phases an exchange runs in: all that a machine allows, and the cheapest of them.

A plan is a sequence of phases, a phase a set of axes exchanged at once. Pure functions of the
topology and the size, so that every rank that agrees on those agrees on the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.exchange_cost import exchange_seconds, is_measured

MAX_PHASES = 3

MIN_GAIN = 0.05
"""What phases must save of the flat exchange's time before "auto" leaves it: about as much as the
same exchange differs from itself (docs/topology.md, rows in which "auto" takes flat)."""

Phases: TypeAlias = "tuple[tuple[str, ...], ...]"


@dataclass(frozen=True)
class PhasePlan:
    """An exchange in phases; one phase over all axes is the flat exchange."""

    phases: Phases
    seconds: float

    @property
    def is_flat(self) -> bool:
        return len(self.phases) == 1

    def __str__(self) -> str:
        return format_phases(self.phases)


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


def plan_phases(
    topology: Topology, size_bytes: float, tapa: Literal["auto", "on", "off"] = "auto"
) -> PhasePlan:
    """Flat ("off"), the cheapest plan with more than one phase ("on"), or the better ("auto").

    "auto" leaves flat for a gain above `MIN_GAIN` only, and compares like with like (`_compares`).
    Of equal costs the first of `all_phases` wins.
    """
    flat, *phased = all_phases(topology)
    flat_plan = _costed(topology, flat, size_bytes)
    if tapa == "auto":
        phased = [phases for phases in phased if _compares(topology, flat, phases, size_bytes)]
    if tapa == "off" or (tapa == "auto" and not phased):
        return flat_plan
    if not phased:
        names = ", ".join(topology.axis_names)
        raise UserError(
            f"tapa='on' needs a topology with two axes or more; {topology.name!r} has: {names}"
        )
    plans = (_costed(topology, phases, size_bytes) for phases in phased)
    best = min(plans, key=lambda plan: _to_nine_digits(plan.seconds))
    gains = best.seconds < (1 - MIN_GAIN) * flat_plan.seconds
    return best if gains or tapa == "on" else flat_plan


def _costed(topology: Topology, phases: Phases, size_bytes: float) -> PhasePlan:
    return PhasePlan(phases, exchange_seconds(topology, phases, size_bytes))


def _compares(topology: Topology, flat: Phases, phases: Phases, size_bytes: float) -> bool:
    """Whether the costs of both come from the same source, and that source can tell them apart.

    Phases that part axes of one link class only save messages. What a message costs next to the
    bytes is a property of the software on the machine: that is left to a measurement.
    """
    if is_measured(topology, flat, size_bytes):
        return is_measured(topology, phases, size_bytes)
    links = [{topology.axis(name).link for name in phase} for phase in phases]
    return len(set().union(*links)) == sum(map(len, links))


def _to_nine_digits(seconds: float) -> float:
    """Sums in another order differ in their last digits; that must not choose a plan."""
    return float(f"{seconds:.8e}")
