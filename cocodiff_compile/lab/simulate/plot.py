# SPDX-License-Identifier: Apache-2.0
"""Draws a simulation as stacked bars of computation and exposed communication."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.simulate.run import Row, Simulation
from cocodiff_compile.lab.simulate.variants import FLAT

SUFFIXES = (".png", ".svg", ".pdf")
_COMPUTE, _EXPOSED = "#4c6a92", "#e0803c"


def check_plot(path: Path) -> None:
    """Raises UserError unless `path` can be drawn to here."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional)
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'cocodiff-compile[plots]'") from None
    return Figure


def plot_simulation(simulation: Simulation, path: Path) -> None:
    """Writes the picture; its kind follows from the name."""
    figure = _matplotlib()(figsize=(2.5 + 0.8 * len(simulation.rows), 4.4), layout="constrained")
    axes = figure.subplots()
    bars: dict[float, Row] = {}
    lines = max(row.variant.count("|") for row in simulation.rows)
    left = 0.0
    for _, group in itertools.groupby(simulation.rows, key=lambda row: row.nodes):
        rows = list(group)
        bars.update((left + place, row) for place, row in enumerate(rows))
        _group_label(axes, left + (len(rows) - 1) / 2, rows[0], lines)
        left += len(rows) + 0.8
    _draw_bars(axes, bars)
    _dress(axes, simulation)
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Any, bars: dict[float, Row]) -> None:
    compute = [row.timeline.compute_s * 1e3 for row in bars.values()]
    exposed = [row.timeline.exposed_s * 1e3 for row in bars.values()]
    axes.bar(list(bars), compute, 0.82, color=_COMPUTE, label="computation")
    label = "exposed communication"
    axes.bar(list(bars), exposed, 0.82, compute, color=_EXPOSED, label=label)
    for x, row in bars.items():
        step = (row.timeline.compute_s + row.timeline.exposed_s) * 1e3
        text = f"{step:.0f}" if step >= 100 else f"{step:.3g}"
        text += "" if row.variant == FLAT else f"\n{row.speedup:.2f}x"
        axes.annotate(text, (x, step), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(list(bars), [row.variant.replace(" | ", "\n| ") for row in bars.values()])


def _group_label(axes: Any, x: float, row: Row, lines: int) -> None:
    nodes = "1 node" if row.nodes == 1 else f"{row.nodes} nodes"
    axes.annotate(
        f"{nodes}, degree {row.degree}",
        (x, 0),
        (0, -20 - 10 * lines),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="top",
        fontweight="bold",
        fontsize=9,
    )


def _dress(axes: Any, simulation: Simulation) -> None:
    settings = simulation.settings
    cut = "" if settings.max_layers is None else f" (--layers {settings.max_layers})"
    size = f"{settings.resolution} x {settings.resolution}"
    title = f"{simulation.shape.title}{cut}, {size}, {settings.topology}: simulated"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel("ms per step (simulated)")
    axes.margins(x=0.02, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0, labelsize=8)
    axes.legend(
        frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, ncols=2
    )
