"""Compares the published micro-benchmark of one Aurora node with the cost model.

It is what Aurora's constants are fitted to (`topology/presets.py`), and nothing else is. Sizes are
per rank; figures from arXiv 2604.14561.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff_compile.cost.exchanges import phase_seconds
from cocodiff_compile.report.describe import format_table
from cocodiff_compile.topology.presets import aurora

RANKS = 12
FLAT = (("tile", "gpu"),)
TILE, GPU = (("tile",),), (("gpu",),)
PHASED = (*TILE, *GPU)


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


def exchange_ms(phases: tuple[tuple[str, ...], ...], size_mb: float) -> float:
    """Returns the time of one exchange alone, its phases one after the other, without copies."""
    return sum(phase_seconds(aurora(RANKS), axes, size_mb * 1e6) for axes in phases) * 1e3


def reproduce() -> list[Figure]:
    """Returns every published figure, times first, then ratios."""
    return [
        _time("flat", FLAT, 48, 25.5),
        _time("phase 1, tile", TILE, 48, 0.5),
        _time("phase 2, gpu", GPU, 48, 6.0),
        _time("phase 1, tile", TILE, 3, 0.3),
        _ratio("phase 2 / phase 1", GPU, TILE, 48, 6.0 / 0.5),
        _ratio("flat / both phases", FLAT, PHASED, 48, 25.5 / 6.5),
        _ratio("flat / both phases", FLAT, PHASED, 24, 3.0),
        _ratio("flat / both phases", FLAT, PHASED, 6, 1.0),
    ]


def _time(
    what: str, phases: tuple[tuple[str, ...], ...], size_mb: float, published: float
) -> Figure:
    return Figure(what, size_mb, "ms", published, exchange_ms(phases, size_mb))


def _ratio(
    what: str,
    above: tuple[tuple[str, ...], ...],
    below: tuple[tuple[str, ...], ...],
    size_mb: float,
    published: float,
) -> Figure:
    simulated = exchange_ms(above, size_mb) / exchange_ms(below, size_mb)
    return Figure(what, size_mb, "x", published, simulated)


def format_microbenchmark(figures: list[Figure]) -> str:
    rows = [
        (
            figure.what,
            f"{figure.size_mb:g}",
            f"{figure.published:.2f} {figure.unit}",
            f"{figure.simulated:.2f} {figure.unit}",
            f"{figure.deviation:+.1%}",
        )
        for figure in figures
    ]
    headers = ("12 ranks, one exchange", "MB per rank", "published", "simulated", "deviation")
    return format_table(headers, rows)
