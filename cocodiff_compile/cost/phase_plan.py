# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest phases for an exchange. Pure functions of the topology and the size, so that
every rank that agrees on those agrees on the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cocodiff_compile.cost.exchanges import exchange_seconds, is_measured
from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.phases import Phases, all_phases, format_phases

MIN_GAIN = 0.05
"""What phases must save of the flat exchange's time before "auto" leaves it: about as much as the
same exchange differs from itself (docs/topology.md, rows in which "auto" takes flat)."""


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


def plan_phases(
    topology: Topology, size_bytes: float, tapa: Literal["auto", "on", "off"] = "auto"
) -> PhasePlan:
    """Returns the flat plan ("off"), the cheapest one with more than one phase ("on"), or the
    better of both ("auto").

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
    """Returns whether both costs come from the same source, and that source can tell them apart.

    Phases that part axes of one link class only save messages. What a message costs next to the
    bytes is a property of the software on the machine: that is left to a measurement.
    """
    if is_measured(topology, flat, size_bytes):
        return is_measured(topology, phases, size_bytes)
    links = [{topology.axis(name).link for name in phase} for phase in phases]
    return len(set().union(*links)) == sum(map(len, links))


def _to_nine_digits(seconds: float) -> float:
    """Returns a time without the last digits, so that the order of a sum chooses no plan."""
    return float(f"{seconds:.8e}")
