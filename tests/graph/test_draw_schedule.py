# SPDX-License-Identifier: Apache-2.0
"""The estimated step as a picture and as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cocodiff_compile.compiler.explain import explain
from cocodiff_compile.cost.tasks import Task
from cocodiff_compile.cost.timeline import Span, Timeline
from cocodiff_compile.errors import UserError
from cocodiff_compile.report.draw_schedule import draw_schedule
from cocodiff_compile.schedule.estimate import ScheduleEstimate, estimate_schedule
from tests.support.captured import fake_ranks
from tests.support.hand_written import HEADS, WIDTH, Block

MS = 1e-3


def _estimate() -> ScheduleEstimate:
    """Work that does not need an exchange stands behind its wait: 4 + 2 + 3 ms, then 4 + 2."""
    return estimate_schedule(
        [
            Task("start", "start", (), exchange_s=4 * MS, busy_s=4 * MS, links=("net",), site=0),
            Task("wait", "wait", (0,), site=0),
            Task("attention", "compute", (1,), 2 * MS, site=0, work="attention"),
            Task("free", "compute", (), 3 * MS, work="matmul"),
        ]
    )


def _spans(trace: Path) -> dict[int, list[tuple[str, str, float, float]]]:
    found: dict[int, list[tuple[str, str, float, float]]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            span = (event["name"], event["cat"], round(event["ts"]), round(event["dur"]))
            found.setdefault(event["pid"], []).append(span)
    return found


def test_the_trace_holds_both_orders(tmp_path: Path) -> None:
    draw_schedule(_estimate(), tmp_path / "step.json")
    captured, ordered = _spans(tmp_path / "step.json").values()
    exchange = ("start", "exchange", 0, 4000)
    assert captured == [
        exchange,
        ("wait", "wait", 0, 4000),
        ("attention", "attention", 4000, 2000),
        ("free", "matmul", 6000, 3000),
    ]
    assert ordered == [
        exchange,
        ("free", "matmul", 0, 3000),
        ("wait", "wait", 3000, 1000),
        ("attention", "attention", 4000, 2000),
    ]


def test_the_picture_names_both_orders(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_schedule(_estimate(), tmp_path / "step.svg")
    picture = (tmp_path / "step.svg").read_text()
    assert "as captured: 9.0 ms, of which 4.0 ms exposed" in picture
    assert "as ordered: 6.0 ms, of which 1.0 ms exposed" in picture


def test_a_name_that_cannot_be_drawn_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step\.txt: the name must end in \.svg"):
        draw_schedule(_estimate(), tmp_path / "step.txt")


def test_a_part_of_a_timeline_begins_at_zero() -> None:
    spans = [Span("a", str(begin), "matmul", begin, begin + 10) for begin in (0, 10, 20, 30)]
    part = Timeline(tuple(spans)).between(15, 30)
    assert [(span.name, span.begin_s, span.seconds) for span in part.spans] == [
        ("10", 0, 5),
        ("20", 5, 10),
    ]


def test_explain_draws_what_it_estimated(tmp_path: Path) -> None:
    with fake_ranks(HEADS):
        explanation = explain(Block().eval(), torch.ones(1, 2, WIDTH))
    explanation.draw(tmp_path / "step.json")
    captured, _ = _spans(tmp_path / "step.json").values()
    assert sum(category == "exchange" for _, category, *_ in captured) == 4
    with pytest.raises(UserError, match="nothing to draw"):
        explain(torch.nn.Linear(2, 2), torch.ones(1, 2)).draw(tmp_path / "none.svg")
