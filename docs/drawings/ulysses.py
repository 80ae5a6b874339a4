# SPDX-License-Identifier: Apache-2.0
"""Draws what each rank holds before, during and after an attention with Ulysses."""

from __future__ import annotations

from docs.drawings.canvas import EXCHANGE, HEADS, MUTED, Canvas

RANKS, TOKENS, CELL, GAP = 4, 8, 22, 14
TOP = 84


def draw() -> str:
    """Returns the drawing."""
    canvas = Canvas(860, 372, "Ulysses: from shares of tokens to shares of heads and back")
    for x, words, more in (
        (128, "some tokens, all heads", "projections, norms, MLP"),
        (416, "all tokens, some heads", "attention"),
        (742, "some tokens, all heads", "projections, norms, MLP"),
    ):
        canvas.label((x, 34), words, 15, weight="600")
        canvas.label((x, 54), more, 12, fill=MUTED)
    for left in (84, 698):
        _token_shares(canvas, left)
    _head_shares(canvas, 306)
    for x, words in ((238, "Q, K, V"), (594, "O")):
        canvas.label((x, 176), words, 15, weight="600", fill=EXCHANGE)
        canvas.label((x, 218), "all-to-all", 12, fill=EXCHANGE)
        canvas.arrow((x - 34, 193), (x + 34, 193), EXCHANGE, stroke_width="4")
    _legend(canvas)
    return canvas.text


def _token_shares(canvas: Canvas, left: int) -> None:
    per_rank = TOKENS // RANKS
    for rank in range(RANKS):
        top = TOP + rank * (per_rank * CELL + GAP)
        canvas.label((left - 10, top + CELL + 4), f"rank {rank}", 12, anchor="end")
        for row in range(per_rank):
            for head in range(RANKS):
                place = (left + head * CELL, top + row * CELL)
                _cell(canvas, place, head, rank * per_rank + row)


def _head_shares(canvas: Canvas, left: int) -> None:
    for rank in range(RANKS):
        x = left + rank * (CELL + 44)
        canvas.label((x + CELL / 2, TOP + TOKENS * CELL + 24), f"rank {rank}", 12)
        for token in range(TOKENS):
            _cell(canvas, (x, TOP + token * CELL), rank, token)


def _cell(canvas: Canvas, place: tuple[float, float], head: int, token: int) -> None:
    canvas.box(place, (CELL - 2, CELL - 2), HEADS[head])
    middle = (place[0] + CELL / 2 - 1, place[1] + CELL / 2 + 3)
    canvas.label(middle, str(token), 10.5, fill="#ffffff")


def _legend(canvas: Canvas) -> None:
    for head, color in enumerate(HEADS):
        canvas.box((312 + head * 66, 332), (12, 12), color)
        canvas.label((330 + head * 66, 342), f"head {head}", 11.5, anchor="start", fill=MUTED)
    canvas.label((84, 342), "a number is a token", 11.5, anchor="start", fill=MUTED)
