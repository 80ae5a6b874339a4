# SPDX-License-Identifier: Apache-2.0
"""Draws a topology: nested boxes of ranks, and the links that join them.

    ┌ node 0 ───────────────────┐
    │ ┌ gpu 0 ┐  ┌ gpu 1 ┐      │   ranks: squares; NICs, where ranks share them: dots
    │ │ 0   1 │  │ 2   3 │      │   a bar per link class joins what it connects,
    │ └───────┘  └───────┘      │   the faster the thicker
    └───────────────────────────┘

The layout is plain geometry (`lay_out`), which tests check without matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.rank_graph import rank_graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
COLOURS = ("#1b8a7a", "#d98e04", "#c8404f", "#5b5fc7", "#6b7280")
INK, RANK_FILL = "#1f2937", "#ffffff"
LANDSCAPE = 1.7
"""The ratio of width to height that the arrangement of boxes aims at."""
MIN_WIDTH = 20.0
MAX_DRAWN_RANKS = 4096
GAP, HEADER, BAR = 0.45, 0.75, 0.8
"""Sizes in widths of a rank's square: around boxes, for their names, for the bar below a row."""


@dataclass(frozen=True)
class Placed:
    """Holds the geometry of a box, or without an axis of a rank, from its lower left corner."""

    x: float
    y: float
    width: float
    height: float
    label: str
    axis: Axis | None = None
    rows: tuple[tuple[Placed, ...], ...] = ()

    def every(self) -> Iterator[Placed]:
        """Yields this and everything inside, outer boxes first."""
        yield self
        for row in self.rows:
            for part in row:
                yield from part.every()


def draw_topology(topology: Topology, path: Path) -> None:
    """Writes the picture; the suffix of `path` determines the format."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"cannot draw to {path}; allowed: a name that ends in .png or .svg")
    if topology.num_ranks > MAX_DRAWN_RANKS:
        raise UserError(f"cannot draw {topology.num_ranks} ranks; allowed: {MAX_DRAWN_RANKS}")
    try:
        from matplotlib import rc_context  # noqa: PLC0415  (optional)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'cocodiff-compile[plots]'") from None
    machine = lay_out(topology)
    colours = link_colours(topology)
    legend_height = 1.2 + 1.1 * (len(colours) + bool(topology.measured))
    width, height = max(machine.width, MIN_WIDTH) + 1, machine.height + legend_height + 2.2
    inch = min(0.42, 16 / width)
    figure = Figure(figsize=(width * inch, height * inch))
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(-legend_height, machine.height + 2.2)
    axes.axis("off")
    point = inch * 72
    _draw_machine(axes, topology, machine, colours, point)
    _draw_words(axes, topology, machine, colours, point)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cocodiff"}):
            figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def lay_out(topology: Topology) -> Placed:
    """Returns the whole machine, its lower left corner at (0, 0)."""
    return _lay_out_box(topology, len(topology.axes), 0, 0.0, 0.0)


def _lay_out_box(topology: Topology, level: int, first_rank: int, x: float, y: float) -> Placed:
    """Returns the box of `level` axes whose lowest rank is `first_rank`; with none, that rank."""
    if level == 0:
        return Placed(x, y, 1.0, 1.0, str(first_rank))
    axis = topology.axes[level - 1]
    stride = math.prod(inner.size for inner in topology.axes[: level - 1])
    part = _lay_out_box(topology, level - 1, 0, 0, 0)
    columns = _columns(axis.size, part, level)
    count = math.ceil(axis.size / columns)
    left = GAP + (BAR if count > 1 else 0)
    step_x, step_y = part.width + GAP, part.height + BAR + GAP
    width, height = left + columns * step_x, count * step_y + HEADER
    rows = []
    for row in range(count):
        below = y + height - HEADER - (row + 1) * step_y + BAR + GAP
        parts = []
        for index in range(row * columns, min(axis.size, (row + 1) * columns)):
            beside = x + left + (index - row * columns) * step_x
            first = first_rank + index * stride
            parts.append(_lay_out_box(topology, level - 1, first, beside, below))
        rows.append(tuple(parts))
    return Placed(x, y, width, height, _label(topology, level, first_rank), axis, tuple(rows))


def _columns(size: int, part: Placed, level: int) -> int:
    """Returns the parts per row that come nearest to LANDSCAPE; up to 6 ranks stay in one row."""
    if level == 1 and size <= 6:
        return size

    def off(columns: int) -> tuple[float, int]:
        rows = math.ceil(size / columns)
        shape = columns * (part.width + GAP) / (rows * (part.height + BAR + GAP) + HEADER)
        return abs(math.log(shape / LANDSCAPE)) + 0.5 * (rows * columns - size), columns

    return min(range(1, size + 1), key=off)


def _label(topology: Topology, level: int, first_rank: int) -> str:
    """Returns the name of a box, its position on the next outer axis: `node 1` is the second."""
    if level == len(topology.axes):
        return ""
    return f"{topology.axes[level].name} {topology.coordinates(first_rank)[level]}"


def _draw_machine(
    axes: Axes, topology: Topology, machine: Placed, colours: Mapping[Link, str], point: float
) -> None:
    nics = nics_per_part(topology)
    for depth, box in enumerate(machine.every()):
        if box.axis is None:
            _draw_box(axes, box, INK, RANK_FILL, 0.04 * point)
            _write(axes, box.x + 0.5, box.y + 0.48, box.label, 0.44 * point, ha="center")
            continue
        shade = "#f7f8fa" if depth == 0 else "#ffffff"
        _draw_box(axes, box, "#9aa3b2", shade, 0.05 * point)
        size = _fitting(box.label, 0.46, box.width - 2 * GAP) * point
        _write(axes, box.x + GAP, box.y + box.height - 0.45, box.label, size, weight="bold")
        _draw_links(axes, box, colours[box.axis.link], nics[box.axis.name], point)


def _draw_links(axes: Axes, box: Placed, colour: str, nics: int, point: float) -> None:
    """Draws a bar below each row of parts, stubs up to them, and a trunk that joins rows."""
    assert box.axis is not None
    line: dict[str, Any] = {"color": colour, "linewidth": thickness(box.axis.link) * point / 30}
    trunk = box.x + GAP
    bars = []
    for row in box.rows:
        bar = row[0].y - 0.55 * BAR
        bars.append(bar)
        begin = trunk if len(box.rows) > 1 else stubs(row[0], nics)[0]
        axes.plot([begin, stubs(row[-1], nics)[-1]], [bar, bar], solid_capstyle="round", **line)
        for part in row:
            for stub in stubs(part, nics):
                axes.plot([stub, stub], [bar, part.y], solid_capstyle="butt", **line)
                if part.axis is not None:
                    axes.plot(stub, part.y, "o", color=colour, markersize=0.26 * point, zorder=5)
    if len(bars) > 1:
        axes.plot([trunk, trunk], [bars[0], bars[-1]], solid_capstyle="round", **line)


def stubs(part: Placed, nics: int) -> list[float]:
    count = nics if part.axis is not None else 1
    return [part.x + part.width * (index + 1) / (count + 1) for index in range(count)]


def nics_per_part(topology: Topology) -> dict[str, int]:
    """Returns how many links of an axis leave each box it joins: its NICs, or one per rank."""
    graph = rank_graph(topology)
    counts = {}
    for axis in topology.axes:
        switch = next(node for node, its in graph.nodes.items() if its.get("axis") == axis.name)
        counts[axis.name] = nx.degree(graph, switch) // axis.size
    return counts


def _draw_words(
    axes: Axes, topology: Topology, machine: Placed, colours: Mapping[Link, str], point: float
) -> None:
    sizes = " x ".join(f"{axis.size} {axis.name}" for axis in topology.axes)
    title = f"{topology.name}: {topology.num_ranks} ranks = {sizes}"
    room = max(machine.width, MIN_WIDTH)
    size = _fitting(title, 0.75, room) * point
    _write(axes, 0, machine.height + 1.1, title, size, weight="bold")
    for row, (link, colour) in enumerate(colours.items()):
        y = -1.2 - 1.1 * row
        axes.plot([0.1, 1.7], [y, y], color=colour, linewidth=thickness(link) * point / 30)
        words = f"{link.name}: {link_figures(link)}"
        _write(axes, 2.2, y, words, _fitting(words, 0.5, room - 2.2) * point)
    if topology.measured:
        words = _measured(topology)
        size = _fitting(words, 0.5, room) * point
        _write(axes, 0.1, -1.2 - 1.1 * len(colours), words, size)


def _measured(topology: Topology) -> str:
    """Returns the times at the largest measured size, along each axis and flat."""
    size = topology.measured[0].points[-1][0]
    shown: dict[tuple[str, ...], str] = {(name,): name for name in topology.axis_names}
    shown[topology.axis_names] = "flat"
    times = ", ".join(
        f"{shown[phase.axes]} {phase.seconds(size) * 1e3:.3g} ms"
        for phase in topology.measured
        if phase.axes in shown and phase.in_flight == 1
    )
    return f"measured at {size / 1e6:g} MB per rank: {times}"


def link_figures(link: Link) -> str:
    words = [
        f"{_speed(link.bytes_per_s)} one way",
        f"{_speed(link.both_ways_bytes_per_s)} both ways",
        f"latency {link.latency_s * 1e6:g} us",
    ]
    if link.ranks_per_link != 1:
        words.append(f"{link.ranks_per_link:g} ranks share a link")
    return ", ".join(words)


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:g} GB/s"


def thickness(link: Link) -> float:
    """Returns a width in points: 1.5 at 1 GB/s, and one more for each factor of ten."""
    return min(5.0, max(1.0, 1.5 + math.log10(link.bytes_per_s / 1e9)))


def link_colours(topology: Topology) -> dict[Link, str]:
    links = dict.fromkeys(axis.link for axis in topology.axes)
    return {link: COLOURS[number % len(COLOURS)] for number, link in enumerate(links)}


def _draw_box(axes: Axes, box: Placed, edge: str, fill: str, linewidth: float) -> None:
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415  (optional)

    rounded = 0.18
    axes.add_patch(
        FancyBboxPatch(
            (box.x + rounded, box.y + rounded),
            box.width - 2 * rounded,
            box.height - 2 * rounded,
            boxstyle=f"round,pad={rounded}",
            edgecolor=edge,
            facecolor=fill,
            linewidth=linewidth,
        )
    )


def _fitting(text: str, size: float, room: float) -> float:
    """Returns a letter height, `size` at most, at which `text` is no wider than `room`."""
    letter = 0.68  # width to height of a bold one, on average
    return min(size, room / (letter * max(1, len(text))))


def _write(axes: Axes, x: float, y: float, text: str, size: float, **more: Any) -> None:
    axes.text(x, y, text, fontsize=size, color=INK, va="center", **more)
