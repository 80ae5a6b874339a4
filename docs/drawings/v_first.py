# SPDX-License-Identifier: Apache-2.0
"""Draws a block in the order in which it was written, and V first."""

from __future__ import annotations

from docs.drawings.canvas import ATTENTION, COMPUTE, LIGHT_COMPUTE, MUTED, Canvas
from docs.drawings.lanes import Task, draw_lanes, mark_end

PROJECT, NORM, SEND, ATTEND, MLP = 1.0, 0.7, 1.2, 2.4, 2.4
LEFT, SCALE = 96, 51.0


def _make(role: str) -> list[Task]:
    made = Task(f"{role} made", "compute", PROJECT, COMPUTE, shown=f"make {role}")
    if role == "V":
        return [made]
    return [made, Task(f"{role} norm", "compute", NORM, LIGHT_COMPUTE, shown="norm")]


def _send(role: str, after: str = "") -> Task:
    made = "V made" if role == "V" else f"{role} norm"
    return Task(f"{role} sent", "links", SEND, after=(after or made,), shown=role)


def written_order() -> list[Task]:
    """Returns a block that sends when all is made, and waits for each exchange at once."""
    made = [*_make("Q"), *_make("K"), *_make("V")]
    sends = [_send(role, "V made") for role in "QKV"]
    return [*made, *sends, *_rest(("Q sent", "K sent", "V sent")), _mlp(("O sent",))]


def v_first_order() -> list[Task]:
    """Returns the same work: what is ready first is sent first, and the MLP fills the gaps."""
    made = [task for role in "VQK" for task in (*_make(role), _send(role))]
    return [*made, _mlp(()), *_rest(("Q sent", "K sent", "V sent")), _last()]


def _mlp(after: tuple[str, ...]) -> Task:
    return Task("MLP", "compute", MLP, COMPUTE, after=after)


def _rest(after: tuple[str, ...]) -> list[Task]:
    attend = Task("attention", "compute", ATTEND, ATTENTION, after=after)
    return [attend, Task("O sent", "links", SEND, after=("attention",), shown="O")]


def _last() -> Task:
    return Task("end", "compute", 0.0, COMPUTE, after=("O sent",))


def draw() -> str:
    """Returns the drawing."""
    canvas = Canvas(860, 300, "V-First: exchanges hide behind computation")
    panels = (("as captured", written_order()), ("V first", v_first_order()))
    for number, (words, tasks) in enumerate(panels):
        top = 62 + number * 128
        canvas.label((LEFT, top - 16), words, 15, anchor="start", weight="600")
        length = draw_lanes(canvas, (LEFT, top), SCALE, tasks)
        mark_end(canvas, (LEFT + length * SCALE, top))
    canvas.label((LEFT, 284), "time, not to scale", 11.5, anchor="start", fill=MUTED)
    return canvas.text
