# SPDX-License-Identifier: Apache-2.0
"""Draws what is shared out over ranks: a row per module in the order of the program, as SVG.

    blocks.0-18 (19)   [######################  ]  98 % of 12.1 ms   2 Ulysses
    proj_out           [########################] 100 % of 30.0 us              gathers 3.0 KiB

The bar is the time of the module; what is shared out is filled. A row whose shares are gathered is
marked. Modules that are alike but for a number share a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from cocodiff_compile.decide.shard_report import ModuleShare, ShardReport
from cocodiff_compile.report.describe_sharing import attention_modes, folded, percent
from cocodiff_compile.report.tables import format_bytes, format_seconds

_SHARED, _WHOLE, _GATHER, _INK, _FAINT = "#4c6a92", "#f1d9c8", "#e0803c", "#1f2937", "#6b7280"
_ROW, _BAR, _BAR_WIDTH, _TOP, _EDGE = 22, 14, 260, 74, 12
_LETTER = 6.2
"""The width of a letter of the text beside bars."""


@dataclass(frozen=True)
class _Columns:
    """Holds where bars, and the texts beside them, begin."""

    bar: float
    time: float
    modes: float
    gathers: float
    width: float

    @classmethod
    def of(cls, names: list[str], modes: list[str]) -> _Columns:
        """Returns columns as wide as their longest text."""
        bar = _EDGE + _LETTER * max(map(len, names), default=0) + 10
        time = bar + _BAR_WIDTH + 10
        beside = time + 125
        gathers = beside + _LETTER * max(map(len, modes), default=0) + 15
        return cls(bar, time, beside, gathers, max(gathers + 170, 640))


def draw_sharing(report: ShardReport) -> str:
    """Returns the picture as the text of an SVG file."""
    rows = folded(report.modules)
    names = [_name(module, count) for _, count, module in rows]
    columns = _Columns.of(names, [_modes(row) for row, _, _ in rows])
    height = _TOP + _ROW * len(rows) + _EDGE
    parts = [_head(report, columns.width)]
    for place, ((row, count, _), name) in enumerate(zip(rows, names, strict=True)):
        each = "each" if count > 1 else ""
        parts.append(_row(row, name, columns, _TOP + _ROW * place, each))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns.width:.0f}" height="{height}" '
        f'viewBox="0 0 {columns.width:.0f} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _name(module: str, count: int) -> str:
    return f"{module} ({count})" if count > 1 else module


def _head(report: ShardReport, width: float) -> str:
    what = "shared out" if report.is_applied else "not shared out, it would be"
    title = (
        f"{what} over {report.num_ranks} ranks: {percent(1 - report.whole_part)} of "
        f"{format_seconds(report.one_rank_s)}; estimated step "
        f"{format_seconds(report.step_s)} ({report.gain:.2f}x)"
    )
    legend = ((_SHARED, "a share per rank"), (_WHOLE, "whole on every rank"), (_GATHER, "gathered"))
    parts = [_text(_EDGE, 24, title, size=14)]
    for place, (color, label) in enumerate(legend):
        x = _EDGE + 150 * place
        parts += [_box(x, 40, _BAR, color), _text(x + _BAR + 6, 51, label, color=_FAINT)]
    parts.append(f'<path d="M0 62H{width:.0f}" stroke="#e5e7eb"/>')
    return "\n".join(parts)


def _row(row: ModuleShare, name: str, columns: _Columns, y: int, each: str) -> str:
    shared = row.shared_part * _BAR_WIDTH
    text = f"{percent(row.shared_part)} of {format_seconds(row.shared_s + row.whole_s)}"
    middle = y + _BAR - 3
    parts = [
        _text(columns.bar - 10, middle, name, anchor="end"),
        _box(columns.bar, y, _BAR_WIDTH, _WHOLE),
        _box(columns.bar, y, shared, _SHARED),
        _text(columns.time, middle, text, color=_FAINT),
        _text(columns.modes, middle, _modes(row)),
    ]
    if row.num_gathers:
        times = f"{row.num_gathers} x, " if row.num_gathers > 1 else ""
        gathered = f"gathers {times}{format_bytes(row.gathered_bytes)} {each}".rstrip()
        dot = f'cx="{columns.gathers + 5:.0f}" cy="{y + _BAR / 2:.0f}" r="5"'
        parts.append(f'<circle {dot} fill="{_GATHER}"/>')
        parts.append(_text(columns.gathers + 16, middle, gathered))
    return "\n".join(parts)


def _modes(row: ModuleShare) -> str:
    return f"attentions: {attention_modes(row)}" if row.attentions else ""


def _box(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>'


def _text(
    x: float, y: float, text: str, color: str = _INK, size: int = 11, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
