# SPDX-License-Identifier: Apache-2.0
"""Formats a topology as tables: axes, links, and the phases that the cost model would choose."""

from __future__ import annotations

from pathlib import Path

from cocodiff_compile.cost.exchanges import messages_per_exchange
from cocodiff_compile.cost.phase_plan import plan_phases
from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import shown
from cocodiff_compile.report.tables import format_rows
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.files import load_topology
from cocodiff_compile.topology.measured_phase import REACH
from cocodiff_compile.topology.presets import PRESETS
from cocodiff_compile.topology.read_plain_data import why_no_file

SIZES_MB = (0.02, 0.2, 1.0, 6.0, 24.0, 48.0)


def find_topology(source: str, num_ranks: int | None) -> Topology:
    """Returns a preset by name, sized to `num_ranks`, or a topology from a file."""
    if source in PRESETS:
        if num_ranks is None:
            raise UserError(f"preset {source!r} fits any number of ranks: say how many")
        return PRESETS[source](num_ranks)
    if reason := why_no_file(Path(source)):
        names = ", ".join((*PRESETS, "auto"))
        raise UserError(f"{shown(source)} is neither a preset ({names}) nor a file: {reason}")
    topology = load_topology(Path(source))
    return topology if num_ranks is None else topology.for_ranks(num_ranks)


def format_topology(topology: Topology) -> str:
    """Returns tables of the axes, of the measurements if there are any, and of the plans."""
    sizes = " x ".join(f"{axis.size} {axis.name}" for axis in topology.axes)
    title = f"{topology.name}: {topology.num_ranks} ranks = {sizes}"
    parts = [title, _axes_table(topology), "estimated by the cost model, not measured:"]
    if topology.measured:
        largest_mb = REACH * topology.measured[0].points[-1][0] / 1e6
        source = f"estimated from that up to {largest_mb:g} MB, from the links beyond:"
        parts[2:] = ["measured:", _measured_table(topology), source]
    return "\n\n".join([*parts, _plans_table(topology)])


def _axes_table(topology: Topology) -> str:
    return format_rows(
        [
            {
                "axis": axis.name,
                "size": axis.size,
                "link": axis.link.name,
                "GB/s": f"{axis.link.bytes_per_s / 1e9:g}",
                "both ways": f"{axis.link.both_ways_bytes_per_s / 1e9:g}",
                "latency us": f"{axis.link.latency_s * 1e6:g}",
                "ranks per link": f"{axis.link.ranks_per_link:g}",
            }
            for axis in topology.axes
        ]
    )


def _measured_table(topology: Topology) -> str:
    rows: list[dict[str, object]] = []
    sizes = [size for size, _ in topology.measured[0].points]
    for phase in topology.measured:
        name = "+".join(phase.axes) or "copies"
        each = "" if phase.in_flight == 1 else f", each of {phase.in_flight} at once"
        times = {f"ms at {size / 1e6:g} MB": f"{phase.seconds(size) * 1e3:.3g}" for size in sizes}
        rows.append({"phase along": name + each, **times})
    return format_rows(rows)


def _plans_table(topology: Topology) -> str:
    rows: list[dict[str, object]] = []
    for size_mb in SIZES_MB:
        flat = plan_phases(topology, size_mb * 1e6, "off")
        best = plan_phases(topology, size_mb * 1e6)
        rows.append(
            {
                "MB per rank": f"{size_mb:g}",
                "flat ms": f"{flat.seconds * 1e3:.2f}",
                "chosen phases": best,
                "ms": f"{best.seconds * 1e3:.2f}",
                "flat / chosen": f"{flat.seconds / best.seconds:.2f}",
                "messages": messages_per_exchange(topology, best.phases),
            }
        )
    return format_rows(rows)
