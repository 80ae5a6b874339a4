# SPDX-License-Identifier: Apache-2.0
"""Tests the way from the profiler's events to spans, and from spans to traces and pictures."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cocodiff_compile.cost.timeline import Span, Timeline
from cocodiff_compile.lab.bench.cases import WORKLOADS, Case, Grid
from cocodiff_compile.lab.bench.plot import draw_block, write_trace
from cocodiff_compile.lab.bench.profile import (
    ProfiledStep,
    kind_of,
    profile_step,
    read_timeline,
)
from cocodiff_compile.lab.bench.results import Point


def _event(name: str, thread: int, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": thread, "ts": start, "dur": duration}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    _event("aten::mm", 1, 50, 10),  # before the step: a warm-up of the profiler's
    _event("cocodiff step", 1, 100, 100),
    _event("Torch-Compiled Region: 0/0", 1, 100, 99),
    _event("aten::addmm", 1, 110, 20),
    _event("aten::expand", 1, 111, 2),  # inside addmm
    _event("_c10d_functional::all_to_all_single", 1, 131, 4),
    _event("gloo:all_to_all", 7, 133, 40),
    _event("aten::view", 7, 134, 1),  # inside the exchange
    _event("graph_0_cpp_fused_add_2", 1, 140, 5),
    _event("_c10d_functional::wait_tensor", 1, 150, 23),
    _event("gloo:all_gather", 8, 180, 3),
]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 6)


def test_the_calling_thread_and_each_exchanging_thread_have_a_lane() -> None:
    spans = read_timeline(EVENTS).spans
    assert [(span.lane, span.name, span.kind, _us(span.begin_s)) for span in spans] == [
        ("compute", "aten::addmm", "matmul", 10),
        ("compute", "_c10d_functional::all_to_all_single", "start", 31),
        ("exchange 0", "gloo:all_to_all", "exchange", 33),
        ("compute", "graph_0_cpp_fused_add_2", "kernel", 40),
        ("compute", "_c10d_functional::wait_tensor", "wait", 50),
        ("exchange 1", "gloo:all_gather", "exchange", 80),
    ]


def test_spans_of_one_lane_do_not_overlap() -> None:
    compute = [span for span in read_timeline(EVENTS).spans if span.lane == "compute"]
    for before, after in itertools.pairwise(compute):
        assert before.end_s <= after.begin_s


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("mkldnn::_linear_pointwise", "matmul"),
        ("aten::convolution", "matmul"),
        ("aten::copy_", "kernel"),
        ("graph_0_cpp_fused_mm_7", "kernel"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_real_step_is_profiled() -> None:
    import torch  # noqa: PLC0415

    value = torch.ones(64, 64)
    spans = profile_step(lambda: None, lambda: value @ value).spans
    assert [span.kind for span in spans if "mm" in span.name or "matmul" in span.name] == ["matmul"]
    assert all(span.begin_s >= 0 for span in spans)


def _exchanges(*ends_us: float) -> ProfiledStep:
    spans = [
        Span("exchange 0", "gloo:all_to_all", "exchange", (end - 5) * 1e-6, end * 1e-6)
        for end in ends_us
    ]
    spans.append(Span("compute", "aten::mm", "matmul", 0, 100e-6))
    return ProfiledStep("stock", 0, Timeline(tuple(spans)))


def test_a_block_is_what_lies_between_the_last_exchanges_of_two_blocks() -> None:
    block = _exchanges(10, 20, 40, 60).block(1, 2)
    assert [(span.kind, _us(span.begin_s), _us(span.seconds)) for span in block.spans] == [
        ("exchange", 15, 5),
        ("exchange", 35, 5),
        ("matmul", 0, 40),
    ]


def test_the_trace_has_a_process_per_variant_and_rank(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    timeline = read_timeline(EVENTS)
    steps = [ProfiledStep(variant, rank, timeline) for variant in "ab" for rank in (0, 1)]
    write_trace(steps, file)
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["a, rank 0", "a, rank 1", "b, rank 0", "b, rank 1"]
    assert sum(event["ph"] == "X" for event in events) == 4 * len(timeline.spans)


def test_the_block_is_drawn(tmp_path: Path) -> None:
    case = Case(WORKLOADS["flux"], Grid(2, 1), ("inductor",), (75,))
    steps = [_exchanges(*range(10, 250, 10)).to_json()]
    point = Point(case, {"share": 75, "rate_mbit": 100.0, "profiled_steps": steps})
    draw_block(point, [tmp_path / "block.svg"])
    assert "<svg" in (tmp_path / "block.svg").read_text()
