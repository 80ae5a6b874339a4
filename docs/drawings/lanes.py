# SPDX-License-Identifier: Apache-2.0
"""Draws what computes and what is on the links, in lanes over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from docs.drawings.canvas import EXCHANGE, INK, MUTED, WAIT, Canvas

HEIGHT, GAP = 30, 6


@dataclass(frozen=True)
class Task:
    """Describes a piece of work: in which lane, how long, and which others must be done before."""

    name: str
    lane: str
    length: float
    color: str = EXCHANGE
    after: tuple[str, ...] = ()
    shown: str = ""


def times(tasks: Sequence[Task]) -> dict[str, tuple[float, float]]:
    """Returns begin and end of each task: every lane runs its tasks in the order given."""
    done: dict[str, tuple[float, float]] = {}
    free: dict[str, float] = {}
    for task in tasks:
        begin = max([free.get(task.lane, 0.0), *(done[name][1] for name in task.after)])
        done[task.name] = (begin, begin + task.length)
        free[task.lane] = begin + task.length
    return done


def draw_lanes(
    canvas: Canvas, place: tuple[float, float], scale: float, tasks: Sequence[Task]
) -> float:
    """Draws both lanes of `tasks`, waits included; returns how long they take."""
    left, top = place
    when = times(tasks)
    for number, lane in enumerate(("compute", "links")):
        y = top + number * (HEIGHT + GAP)
        canvas.label((left - 12, y + HEIGHT / 2 + 4), lane, 12, anchor="end", fill=MUTED)
        at = 0.0
        for task in (task for task in tasks if task.lane == lane):
            begin, end = when[task.name]
            if lane == "compute" and begin > at:
                size = ((begin - at) * scale, HEIGHT)
                canvas.named_box((left + at * scale, y), size, WAIT, "waits")
            if task.length:
                size = ((end - begin) * scale, HEIGHT)
                words = task.shown or task.name
                canvas.named_box((left + begin * scale, y), size, task.color, words)
            at = end
    return max(end for _, end in when.values())


def mark_end(canvas: Canvas, place: tuple[float, float], words: str = "") -> None:
    """Draws where the work below a panel ends."""
    x, top = place
    canvas.rule((x, top - 8), (x, top + 2 * HEIGHT + GAP + 8), stroke=INK, stroke_dasharray="3 3")
    canvas.label((x + 7, top + HEIGHT + 7), words, 12, anchor="start", fill=INK)
