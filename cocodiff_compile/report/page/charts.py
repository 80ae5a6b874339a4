# SPDX-License-Identifier: Apache-2.0
"""Draws small charts as SVG that takes its ink from the page: points with ranges, and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

_WIDE, _HIGH, _LEFT, _BELOW = 680, 330, 62, 46
_NAMES, _STRIP, _ROW = 210, 520, 26
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True)
class ChartPoint:
    """A point with a name; `low` and `high` are the range of what `y` is the mean of."""

    name: str
    x: float
    y: float
    low: float
    high: float
    color: str = "#4c6a92"


def scatter(points: Sequence[ChartPoint], x_label: str, y_label: str) -> str:
    """Returns points, each with a line over its range."""
    across = _Scale.over([point.x for point in points], _LEFT, _WIDE - 130)
    up = _Scale.over([y for point in points for y in (point.low, point.high)], _HIGH - _BELOW, 12)
    parts = [_grid_line(across, value, upright=True) for value in across.ticks]
    parts += [_grid_line(up, value, upright=False) for value in up.ticks]
    for number, point in enumerate(sorted(points, key=lambda item: item.y)):
        x, y, low, high = across(point.x), up(point.y), up(point.low), up(point.high)
        said = f"{point.name}: {point.y:.1f} ({point.low:.1f} to {point.high:.1f}) at {point.x:.2f}"
        parts.append(
            f'<g><title>{escape(said)}</title><path d="M{x:.1f} {low:.1f}V{high:.1f}" '
            f'stroke="{point.color}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" '
            f'fill="{point.color}"/></g>'
        )
        parts.append(_text(x + 8, y + (4 if number % 2 else -6), point.name))
    parts.append(_text((_LEFT + _WIDE - 130) / 2, _HIGH - 8, x_label, "middle"))
    turned = f'transform="translate(14 {_HIGH / 2 - 20:.0f}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(y_label)}</text>')
    return _svg(_WIDE, _HIGH, f"{y_label} by {x_label}", parts)


def samples(rows: Sequence[tuple[str, Sequence[float], str]], unit: str, mark: float | None) -> str:
    """Returns a row for each name, color and its samples: a dot for each, a bar at their median.
    `mark` draws a line through all rows, a limit say.
    """
    every = [value for _, values, _ in rows for value in values] + ([mark] if mark else [])
    across = _Scale.over([0.0, *every], _NAMES, _NAMES + _STRIP)
    high = _ROW * len(rows) + 40
    parts = [_upright(across(value), 8, high - 26, 0.15) for value in across.ticks]
    parts += [_text(across(value), high - 8, f"{value:g}", "middle") for value in across.ticks]
    if mark:
        parts.append(_upright(across(mark), 8, high - 26, 0.9, "4 3"))
    for place, (name, values, color) in enumerate(rows):
        y = 8 + _ROW * place + _ROW / 2
        parts.append(
            _text(_NAMES - 10, y + 4, name if len(name) < 33 else name[:31] + "...", "end")
        )
        for value in values:
            parts.append(
                f'<circle cx="{across(value):.1f}" cy="{y:.1f}" r="3.5" fill="{color}" '
                f'fill-opacity="0.5"><title>{value:.4g} {escape(unit)}</title></circle>'
            )
        middle = across(median(values))
        parts.append(f'<path d="M{middle:.1f} {y - 9:.1f}v18" stroke="{color}" stroke-width="3"/>')
        parts.append(_text(across.end + 12, y + 4, f"{median(values):.4g} {unit}"))
    return _svg(_NAMES + _STRIP + 110, high, f"samples, {unit}", parts)


@dataclass(frozen=True)
class _Scale:
    """Turns values into places."""

    least: float
    most: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> _Scale:
        """Returns a scale with room for all values that are finite."""
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        least, most = min(finite), max(finite)
        room = 0.05 * (most - least) or 0.5
        return cls(least if least == 0 else least - room, most + room, begin, end)

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.least), self.most) - self.least) / (self.most - self.least)
        return self.begin + share * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        """Returns some round values."""
        step = 10 ** math.floor(math.log10((self.most - self.least) / 4))
        for factor in (1, 2, 5, 10):
            if (self.most - self.least) / (step * factor) <= 7:
                step *= factor
                break
        first = math.ceil(self.least / step)
        return [round(n * step, 12) for n in range(first, math.floor(self.most / step) + 1)]


def _grid_line(scale: _Scale, value: float, upright: bool) -> str:
    at = scale(value)
    if upright:
        line = _upright(at, 12, _HIGH - _BELOW, 0.15)
        return line + _text(at, _HIGH - _BELOW + 17, f"{value:g}", "middle")
    line = (
        f'<path d="M{_LEFT} {at:.1f}H{_WIDE - 130}" stroke="currentColor" stroke-opacity="0.15"/>'
    )
    return line + _text(_LEFT - 8, at + 4, f"{value:g}", "end")


def _upright(x: float, top: float, bottom: float, opacity: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    look = f'stroke="currentColor" stroke-opacity="{opacity:g}"{dashed}'
    return f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" {look}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT} role="img" '
        f'aria-label="{escape(label)}" class="phases">{"".join(parts)}</svg>'
    )
