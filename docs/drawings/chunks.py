# SPDX-License-Identifier: Apache-2.0
"""Draws a block whole, in chunks of heads and in chunks of tokens."""

from __future__ import annotations

from docs.drawings.canvas import ATTENTION, COMPUTE, EXCHANGE, LIGHT_COMPUTE, MUTED, Canvas
from docs.drawings.lanes import Task, draw_lanes, mark_end

QKV, ATTEND, MLP, SEND, SEND_O = 1.5, 2.4, 2.7, 2.2, 1.3
LEFT, SCALE = 96, 59.0
SUBSCRIPTS = "₁₂"


def whole() -> list[Task]:
    """Returns the tail of a block and the head of the next one, each exchange in the open."""
    return [
        Task("send", "links", SEND, shown="Q K V"),
        Task("attention", "compute", ATTEND, ATTENTION, after=("send",)),
        Task("O", "links", SEND_O, after=("attention",)),
        Task("MLP", "compute", MLP, COMPUTE, after=("O",), shown="out, MLP"),
        Task("next", "compute", QKV, LIGHT_COMPUTE, shown="next Q K V"),
        Task("send next", "links", SEND, after=("next",), shown="Q K V"),
        Task("end", "compute", 0, after=("send next",)),
    ]


def head_chunks() -> list[Task]:
    """Returns the same with an attention and its exchanges in two groups of heads."""
    return [
        *(_half(f"send{n}", "links", SEND, f"Q K V {n}") for n in SUBSCRIPTS),
        *(_attend(n) for n in SUBSCRIPTS),
        *(_half(f"O{n}", "links", SEND_O, f"O {n}", f"attention{n}") for n in SUBSCRIPTS),
        Task("MLP", "compute", MLP, COMPUTE, after=("O₂",), shown="out, MLP"),
        Task("next", "compute", QKV, LIGHT_COMPUTE, shown="next Q K V"),
        Task("send next", "links", SEND, after=("next",), shown="Q K V"),
        Task("end", "compute", 0, after=("send next",)),
    ]


def token_chunks() -> list[Task]:
    """Returns the same with all that lies between attentions in two chunks of tokens."""
    first, second = SUBSCRIPTS
    return [
        Task("send", "links", SEND, shown="Q K V"),
        *(_attend(n, "send") for n in SUBSCRIPTS),
        *(_half(f"O{n}", "links", SEND_O, f"O {n}", f"attention{n}") for n in SUBSCRIPTS),
        *_between(first),
        *_between(second),
        Task("end", "compute", 0, after=(f"next sent{second}",)),
    ]


def _between(n: str) -> list[Task]:
    mlp = Task(f"MLP{n}", "compute", MLP / 2, COMPUTE, after=(f"O{n}",), shown=f"MLP {n}")
    project = Task(f"next{n}", "compute", QKV / 2, LIGHT_COMPUTE, shown=f"Q K V {n}")
    return [mlp, project, _half(f"next sent{n}", "links", SEND, f"Q K V {n}", f"next{n}")]


def _half(name: str, lane: str, length: float, shown: str, *after: str) -> Task:
    return Task(name, lane, length / 2, EXCHANGE, after, shown)


def _attend(n: str, after: str = "") -> Task:
    needs = (after or f"send{n}",)
    return Task(f"attention{n}", "compute", ATTEND / 2, ATTENTION, needs, f"attend {n}")


def draw() -> str:
    """Returns the drawing."""
    canvas = Canvas(860, 428, "Chunks: one is computed while another is on the links")
    panels = (
        ("whole", whole()),
        ("two chunks of heads", head_chunks()),
        ("two chunks of tokens", token_chunks()),
    )
    for number, (words, tasks) in enumerate(panels):
        top = 62 + number * 126
        canvas.label((LEFT, top - 16), words, 15, anchor="start", weight="600")
        length = draw_lanes(canvas, (LEFT, top), SCALE, tasks)
        mark_end(canvas, (LEFT + length * SCALE, top))
    canvas.label((LEFT, 412), "time, not to scale", 11.5, anchor="start", fill=MUTED)
    return canvas.text
