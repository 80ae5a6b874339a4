# SPDX-License-Identifier: Apache-2.0
"""Draws how a difference is coded in a few bits and added to what the receiver has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from docs.drawings.canvas import COMPUTE, EXCHANGE, INK, LINE, MUTED, Canvas

COUNT, BITS = 14, 2
BAR, UNIT = 11, 46
GREY = "#b9c2cc"
COLUMNS, TOP, MIDDLE, BOTTOM = (130, 430, 730), 124, 236, 318

BEFORE = [0.9 * math.sin(0.55 * i + 0.4) + 0.25 * math.cos(2.1 * i) for i in range(COUNT)]
NOW = [value + 0.2 * math.sin(1.9 * i + 1.0) for i, value in enumerate(BEFORE)]
DIFFERENCE = [now - before for now, before in zip(NOW, BEFORE, strict=True)]


def coded(values: Sequence[float], bits: int = BITS) -> list[float]:
    """Returns each value at the middle of its step, `bits` bits of them up to the largest value."""
    levels = 2**bits
    step = 2 * max(abs(value) for value in values) / levels
    places = [min(levels - 1, math.floor(value / step + levels / 2)) for value in values]
    return [(place - levels / 2 + 0.5) * step for place in places]


def draw() -> str:
    """Returns the drawing."""
    canvas = Canvas(860, 424, "V-Major: the change since the last step, in a few bits")
    sent = coded(DIFFERENCE)
    arrived = [before + change for before, change in zip(BEFORE, sent, strict=True)]
    sender, between, receiver = COLUMNS
    for x, words in zip(COLUMNS, ("sender", "the difference", "receiver"), strict=True):
        canvas.label((x, 36), words, 15, weight="600")
    _bars(canvas, (sender, TOP), NOW, COMPUTE, "this step")
    _bars(canvas, (sender, BOTTOM), BEFORE, GREY, "last step")
    canvas.label((sender, MIDDLE), "minus", 13, fill=MUTED)
    canvas.arrow((sender + 90, TOP), (between - 92, TOP))
    _bars(canvas, (between, TOP), DIFFERENCE, INK, "what changed")
    canvas.arrow((between, MIDDLE - 20), (between, MIDDLE + 26))
    _bars(canvas, (between, BOTTOM), sent, EXCHANGE, f"in {BITS} bits per element")
    canvas.arrow((between + 92, BOTTOM), (receiver - 110, BOTTOM), EXCHANGE, stroke_width="4")
    _bars(canvas, (receiver, BOTTOM), BEFORE, GREY, "last step")
    canvas.label((receiver, MIDDLE), "plus", 13, fill=MUTED)
    _bars(canvas, (receiver, TOP), arrived, COMPUTE, "what arrives")
    return canvas.text


def _bars(
    canvas: Canvas, middle: tuple[float, float], values: Sequence[float], color: str, words: str
) -> None:
    left, zero = middle[0] - COUNT * BAR / 2, middle[1]
    for place, value in enumerate(values):
        top = zero - max(0.0, value) * UNIT
        canvas.box((left + place * BAR, top), (BAR - 2, abs(value) * UNIT), color, rx="1.5")
    canvas.rule((left - 4, zero), (left + COUNT * BAR + 2, zero), stroke=LINE)
    canvas.label((middle[0], zero + 74), words, 12.5, weight="600")
