# SPDX-License-Identifier: Apache-2.0
"""Writes a simulation as text for people, as plain data for JSON, and as a Chrome trace."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cocodiff_compile.lab.simulate.microbenchmark import Figure
from cocodiff_compile.lab.simulate.run import Row, Simulation
from cocodiff_compile.report.chrome_trace import ChromeTrace
from cocodiff_compile.report.tables import format_rows


def format_simulation(simulation: Simulation) -> str:
    """Returns what was assumed, the steps, and what crosses the links."""
    parts = [_head(simulation), _steps_table(simulation.rows), _links_table(simulation.rows)]
    return "\n\n".join(parts)


def _head(simulation: Simulation) -> str:
    shape, device, settings = simulation.shape, simulation.device, simulation.settings
    layers = sum(shape.num_layers(settings.max_layers).values())
    cut = f" of {sum(shape.layers.values())}" if layers < sum(shape.layers.values()) else ""
    tokens = shape.num_tokens(settings.resolution)
    lines = [
        f"simulated, nothing was run: {shape.title}, {layers}{cut} blocks, {shape.heads} heads x "
        f"{shape.head_size}, bf16, batch 1, {settings.resolution} x {settings.resolution}: "
        f"{tokens} image + {shape.text_tokens} text tokens; a step is one forward",
        f"per rank ({device.name}): {device.matmul_flops_per_s / 1e12:g} TFLOP/s x "
        f"{device.matmul_efficiency:g} in matmuls, x {device.attention_efficiency:g} in attention; "
        f"{device.memory_bytes_per_s / 1e12:g} TB/s x {device.memory_efficiency:g}; at least "
        f"{device.launch_s * 1e6:g} us per kernel, fused pointwise ones apart",
    ]
    return "\n".join([*lines, *simulation.notes])


def _steps_table(rows: tuple[Row, ...]) -> str:
    has_published = any(row.published for row in rows)
    cells = [
        {
            "nodes": row.nodes,
            "ranks": row.num_ranks,
            "degree": row.degree,
            "exchanges": row.variant,
            "phases": row.phases,
            "step ms": f"{row.timeline.step_s * 1e3:.1f}",
            "compute ms": f"{row.timeline.compute_s * 1e3:.1f}",
            "exposed ms": f"{row.timeline.exposed_s * 1e3:.1f}",
            "exposed share": f"{row.timeline.exposed_share:.0%}",
            "flat / this": f"{row.speedup:.2f}x",
            **({"published (another run, not simulated)": row.published} if has_published else {}),
        }
        for row in rows
    ]
    return "simulated step\n" + format_rows(cells)


def _links_table(rows: tuple[Row, ...]) -> str:
    cells = [
        {
            "nodes": row.nodes,
            "exchanges": row.variant,
            "link": use.link,
            "MB per rank": f"{use.rank_bytes / 1e6:.1f}",
            "messages of the group": f"{use.messages:,}",
            "messages per exchange": "" if number else f"{row.messages_per_exchange:,.0f}",
        }
        for row in rows
        for number, use in enumerate(row.links)
    ]
    return "traffic of one step\n" + format_rows(cells)


def trace_data(simulation: Simulation) -> dict[str, Any]:
    """Returns a Chrome trace with a process per case and variant."""
    trace = ChromeTrace()
    for row in simulation.rows:
        title = f"{row.nodes} nodes, {row.degree} ranks, {row.variant} (simulated)"
        trace.add_process(title, row.timeline)
    return trace.to_json()


def simulation_data(simulation: Simulation, figures: list[Figure]) -> dict[str, Any]:
    """Returns everything but the spans, which are in the trace."""
    return {
        "kind": "simulated",
        "settings": asdict(simulation.settings),
        "device": asdict(simulation.device),
        "notes": list(simulation.notes),
        "microbenchmark": [{**asdict(item), "deviation": item.deviation} for item in figures],
        "rows": [_row_data(row) for row in simulation.rows],
    }


def _row_data(row: Row) -> dict[str, Any]:
    timeline = row.timeline
    return {
        "nodes": row.nodes,
        "ranks": row.num_ranks,
        "ulysses_degree": row.degree,
        "exchanges": row.variant,
        "phases": row.phases,
        "step_ms": timeline.step_s * 1e3,
        "compute_ms": timeline.compute_s * 1e3,
        "communication_ms": timeline.in_flight_s * 1e3,
        "exposed_ms": timeline.exposed_s * 1e3,
        "exposed_share": timeline.exposed_share,
        "speedup_over_flat": row.speedup,
        "num_exchanges": row.num_exchanges,
        "messages_per_exchange": row.messages_per_exchange,
        "links": [asdict(use) for use in row.links],
        "published": row.published or None,
    }
