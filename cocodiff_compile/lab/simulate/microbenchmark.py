# SPDX-License-Identifier: Apache-2.0
"""Compares the published micro-benchmark of one Aurora node with the cost model.

It is what Aurora's constants are fitted to (`topology/presets.py`), and nothing else is. Sizes are
per rank; figures from arXiv 2604.14561.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff_compile.cost.exchanges import phase_seconds
from cocodiff_compile.report.tables import format_rows
from cocodiff_compile.topology.presets import aurora

RANKS = 12
Phases = tuple[tuple[str, ...], ...]
FLAT: Phases = (("tile", "gpu"),)
TILE: Phases = (("tile",),)
GPU: Phases = (("gpu",),)
PUBLISHED: tuple[tuple[str, float, float, Phases, Phases], ...] = (
    ("flat", 48, 25.5, FLAT, ()),
    ("phase 1, tile", 48, 0.5, TILE, ()),
    ("phase 2, gpu", 48, 6.0, GPU, ()),
    ("phase 1, tile", 3, 0.3, TILE, ()),
    ("phase 2 / phase 1", 48, 6.0 / 0.5, GPU, TILE),
    ("flat / both phases", 48, 25.5 / 6.5, FLAT, (*TILE, *GPU)),
    ("flat / both phases", 24, 3.0, FLAT, (*TILE, *GPU)),
    ("flat / both phases", 6, 1.0, FLAT, (*TILE, *GPU)),
)
"""Name, MB per rank, figure, the phases that it is the time of, and those of a ratio's base."""


@dataclass(frozen=True)
class Figure:
    """One published figure; `unit` is "ms" or "x"."""

    what: str
    size_mb: float
    unit: str
    published: float
    simulated: float

    @property
    def deviation(self) -> float:
        return self.simulated / self.published - 1


def exchange_ms(phases: Phases, size_mb: float) -> float:
    """Returns the time of one exchange alone, its phases one after the other, without copies."""
    return sum(phase_seconds(aurora(RANKS), axes, size_mb * 1e6) for axes in phases) * 1e3


def reproduce() -> list[Figure]:
    """Returns every published figure, times first, then ratios."""
    figures = []
    for what, size_mb, published, phases, base in PUBLISHED:
        simulated = exchange_ms(phases, size_mb) / (exchange_ms(base, size_mb) if base else 1)
        figures.append(Figure(what, size_mb, "x" if base else "ms", published, simulated))
    return figures


def format_microbenchmark(figures: list[Figure]) -> str:
    return format_rows(
        [
            {
                "12 ranks, one exchange": figure.what,
                "MB per rank": f"{figure.size_mb:g}",
                "published": f"{figure.published:.2f} {figure.unit}",
                "simulated": f"{figure.simulated:.2f} {figure.unit}",
                "deviation": f"{figure.deviation:+.1%}",
            }
            for figure in figures
        ]
    )
