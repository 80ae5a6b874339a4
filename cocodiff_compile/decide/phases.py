# SPDX-License-Identifier: Apache-2.0
"""Decides in which phases each exchange runs: the cheapest ones, by the machine and the size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cocodiff_compile.cost.phase_plan import plan_phases
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.passes.split_tapa_phases import exchange_key, flat_pieces
from cocodiff_compile.topology.machine import Machine
from cocodiff_compile.topology.phases import Phases


def choose_phases(
    recognition: Recognition, machines: Mapping[str, Machine], tapa: Literal["auto", "on", "off"]
) -> dict[tuple[str, int], Phases]:
    """Returns the phases by group and size, in the order of the exchanges."""
    keys = dict.fromkeys(map(exchange_key, flat_pieces(recognition)))
    return {
        (group, size_bytes): plan_phases(machines[group].topology, size_bytes, tapa).phases
        for group, size_bytes in keys
    }
