# SPDX-License-Identifier: Apache-2.0
"""Draws one exchange of one rank, flat and in two phases."""

from __future__ import annotations

from docs.drawings.canvas import CARD, EXCHANGE, HEADS, INK, LINE, MUTED, Canvas

PER_NODE = 4
PANELS = (150, 430, 710)
NODE_TOPS = (92, 246)
STEP = 52


def draw() -> str:
    """Returns the drawing."""
    canvas = Canvas(860, 388, "TAPA: one exchange, flat and in two phases along the machine")
    panels = (("flat", ""), ("phase 1", "inside of a node"), ("phase 2", "between nodes"))
    for x, (words, more) in zip(PANELS, panels, strict=True):
        canvas.label((x, 34), words, 15, weight="600")
        canvas.label((x, 54), more, 12, fill=MUTED)
        _machine(canvas, x)
    canvas.rule((290, 24), (290, 300), stroke_dasharray="3 4")
    _flat(canvas, PANELS[0])
    _inside(canvas, PANELS[1])
    _between(canvas, PANELS[2])
    _captions(canvas)
    return canvas.text


def _place(x: float, rank: int) -> tuple[float, float]:
    node, place = divmod(rank, PER_NODE)
    return (x + (place - (PER_NODE - 1) / 2) * STEP, NODE_TOPS[node] + 20)


def _machine(canvas: Canvas, x: float) -> None:
    for node, top in enumerate(NODE_TOPS):
        width = STEP * PER_NODE + 12
        canvas.box((x - width / 2, top - 10), (width, 60), "#f1eee5", rx="9", stroke=LINE)
        below = top + (62 if node else -18)
        canvas.label((x - width / 2 + 4, below), f"node {node}", 11, anchor="start", fill=MUTED)
    for rank in range(2 * PER_NODE):
        left, middle = _place(x, rank)
        color = HEADS[0] if rank == 0 else "#b9c2cc"
        canvas.box((left - 14, middle - 14), (28, 28), color, rx="7", stroke=CARD)
        canvas.label((left, middle + 4), str(rank), 12, fill="#ffffff" if rank == 0 else INK)


def _down(canvas: Canvas, x: float, rank: int, width: float) -> None:
    (left, top), (to_left, to_top) = _place(x, 0), _place(x, rank)
    start, end = (left, top + 16), (to_left, to_top - (30 if width > 3 else 17))
    canvas.arrow(start, end, EXCHANGE, stroke_width=str(width))


def _across(canvas: Canvas, x: float, rank: int, width: float) -> None:
    (left, top), (to_left, _) = _place(x, 0), _place(x, rank)
    bend = -4 - 5.5 * rank
    canvas.arrow((left, top - 15), (to_left, top - 15), INK, bend, stroke_width=str(width))


def _flat(canvas: Canvas, x: float) -> None:
    for rank in range(PER_NODE):
        _down(canvas, x, PER_NODE + rank, 1.3)
        if rank:
            _across(canvas, x, rank, 1.3)


def _inside(canvas: Canvas, x: float) -> None:
    for rank in range(1, PER_NODE):
        _across(canvas, x, rank, 2.4)


def _between(canvas: Canvas, x: float) -> None:
    _down(canvas, x, PER_NODE, 5.2)


def _captions(canvas: Canvas) -> None:
    peers = PER_NODE - 1
    for x, first, second in (
        (
            PANELS[0],
            f"{peers} messages inside of the node,",
            f"{PER_NODE} small ones on the slow link",
        ),
        (PANELS[1], f"{peers} messages, twice the size: also", "what the other node is to get"),
        (PANELS[2], "1 message, four times the size,", "with the bytes of all four"),
    ):
        canvas.label((x, 340), first, 12)
        canvas.label((x, 358), second, 12)
