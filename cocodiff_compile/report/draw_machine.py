# SPDX-License-Identifier: Apache-2.0
"""Draws the machine under a Ulysses group, and how long the phases of exchanges keep its links
busy, as SVG that takes its ink from the page around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from cocodiff_compile.report.tables import format_bytes, format_seconds
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.draw import (
    BAR,
    GAP,
    Placed,
    lay_out,
    link_colours,
    link_figures,
    nics_per_part,
    stubs,
    thickness,
)

_MAX_RANKS = 192
_UNIT = 20
"""The width of a rank's square in pixels."""
_MAX_WIDTH = 900
_ROW, _LEFT, _WIDE = 26, 190, 560
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def draw_machine(topology: Topology) -> str:
    """Returns the picture of a machine; of a large one, of its first parts."""
    drawn = _drawable(topology)
    machine, colours = lay_out(drawn), link_colours(drawn)
    nics = nics_per_part(drawn)
    width, height = machine.width + 0.5, machine.height + 0.5
    parts = [_box(box, height) for box in machine.every()]
    for box in machine.every():
        if box.axis is not None:
            parts += _links(box, colours[box.axis.link], nics[box.axis.name], height)
    scale = min(_UNIT, _MAX_WIDTH / width)
    size = f'width="{width * scale:.0f}" height="{height * scale:.0f}"'
    title = f"{topology.num_ranks} ranks of {topology.name}"
    if drawn.num_ranks < topology.num_ranks:
        title += f"; {drawn.num_ranks} of them are drawn"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.2f} {height:.2f}" '
        f'role="img" aria-label="{escape(title)}" class="machine"><title>{escape(title)}</title>'
        + "".join(parts)
        + "</svg>"
    )


def machine_legend(topology: Topology) -> list[tuple[str, str, str]]:
    """Returns the color, the name and the figures of each class of links."""
    colours = link_colours(topology)
    return [
        (colour, _joins(topology, link), link_figures(link)) for link, colour in colours.items()
    ]


def _joins(topology: Topology, link: Link) -> str:
    axes = [f"{axis.size} x {axis.name}" for axis in topology.axes if axis.link == link]
    return f"{link.name} joins {', '.join(axes)}"


def _drawable(topology: Topology) -> Topology:
    """Returns the machine with fewer neighbours on its outer axes, if it is too large to draw."""
    axes: list[Axis] = []
    ranks = 1
    for axis in topology.axes:
        size = max(1, min(axis.size, _MAX_RANKS // ranks))
        axes.append(replace(axis, size=size))
        ranks *= size
    return replace(topology, axes=tuple(axes), measured=())


def _box(box: Placed, height: float) -> str:
    y = height - 0.25 - box.y - box.height
    kind = "rank" if box.axis is None else "part"
    at = f'x="{box.x + 0.2:.2f}" y="{y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
    rect = f'<rect {at} rx="0.18" class="{kind}"/>'
    if box.axis is None:
        middle = f'x="{box.x + 0.7:.2f}" y="{y + 0.65:.2f}" text-anchor="middle"'
        return f'{rect}<text {middle} font-size="0.42">{escape(box.label)}</text>'
    size = min(0.46, box.width / (0.6 * max(1, len(box.label))))
    place = f'x="{box.x + 0.2 + GAP:.2f}" y="{y + 0.6:.2f}"'
    return f'{rect}<text {place} font-size="{size:.2f}">{escape(box.label)}</text>'


def _links(box: Placed, colour: str, nics: int, height: float) -> list[str]:
    """Returns a bar below each row of parts, stubs up to them, and a trunk that joins rows."""
    assert box.axis is not None
    trunk, bars, steps = box.x + GAP + 0.2, [], []
    for row in box.rows:
        bar = height - 0.25 - (row[0].y - 0.55 * BAR)
        bars.append(bar)
        places = [stub + 0.2 for part in row for stub in stubs(part, nics)]
        begin = trunk if len(box.rows) > 1 else places[0]
        steps.append(f"M{begin:.2f} {bar:.2f}H{places[-1]:.2f}")
        steps += [f"M{place:.2f} {bar:.2f}V{height - 0.25 - row[0].y:.2f}" for place in places]
    if len(bars) > 1:
        steps.append(f"M{trunk:.2f} {bars[0]:.2f}V{bars[-1]:.2f}")
    wide = thickness(box.axis.link) / 26
    return [f'<path d="{"".join(steps)}" stroke="{colour}" stroke-width="{wide:.2f}" fill="none"/>']


def draw_phases(rows: Sequence[Mapping[str, Any]], colours: Sequence[str]) -> str:
    """Returns bars: for each size of exchange its phases one behind the other, and below them the
    time that it would take in one phase. `colours` are those of the axes, innermost first.
    """
    longest = max(max(row["seconds"], row["flat_s"]) for row in rows)
    scale = _WIDE / longest if longest else 0.0
    height = _ROW * 2 * len(rows) + 12
    parts = []
    for place, row in enumerate(rows):
        y = 8 + _ROW * 2 * place
        label = f"{row['count']} x {format_bytes(row['size_bytes'])}"
        parts.append(_text(0, y + 13, label))
        x = float(_LEFT)
        for phase in row["phases"]:
            wide = max(1.5, phase["seconds"] * scale)
            parts.append(_bar(x, y, wide, colours[phase["outermost"]], _said(phase)))
            x += wide + 1
        parts.append(_text(x + 8, y + 13, f"{row['name']}: {format_seconds(row['seconds'])}"))
        if len(row["phases"]) > 1:
            flat = max(1.5, row["flat_s"] * scale)
            parts.append(_bar(_LEFT, y + 20, flat, "currentColor", "in one phase", 5, 0.25))
            said = f"flat: {format_seconds(row['flat_s'])}"
            parts.append(_text(_LEFT + flat + 8, y + 27, said, 0.65))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + 260}" '
        f'height="{height}" {_FONT} role="img" aria-label="phases of exchanges" class="phases">'
        + "".join(parts)
        + "</svg>"
    )


def _said(phase: Mapping[str, Any]) -> str:
    return f"{' + '.join(phase['axes'])}: {format_seconds(phase['seconds'])}"


def _bar(
    x: float, y: float, wide: float, colour: str, title: str, high: float = 17, opacity: float = 1
) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high}" rx="2"'
    look = f'fill="{colour}" fill-opacity="{opacity:g}"'
    return f"<rect {at} {look}><title>{escape(title)}</title></rect>"


def _text(x: float, y: float, text: str, opacity: float = 1.0) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" opacity="{opacity:g}">{escape(text)}</text>'


def colours_of_axes(topology: Topology) -> list[str]:
    """Returns the color of each axis, that of its links."""
    colours = link_colours(topology)
    return [colours[axis.link] for axis in topology.axes]
