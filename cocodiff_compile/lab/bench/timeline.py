"""Writes profiled steps of all ranks and variants: a file for Perfetto, a picture of one block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cocodiff_compile.lab.bench.profile import ProfiledStep
from cocodiff_compile.lab.bench.results import Point, Report
from cocodiff_compile.report.chrome_trace import ChromeTrace
from cocodiff_compile.report.lane_charts import LaneChart, draw_charts


def draw_timelines(report: Report, folder: Path) -> list[Path]:
    """Writes a trace and a picture of the middle block per point; returns the paths written."""
    written: list[Path] = []
    for number, point in enumerate(report.points):
        stem = "timeline" if number == 0 else f"timeline_{number}"
        trace, pictures = folder / f"{stem}.json", [folder / f"{stem}{s}" for s in (".svg", ".png")]
        write_trace(point.profiled_steps, trace)
        draw_block(point, pictures)
        written += [trace, *pictures]
    return written


def write_trace(steps: Sequence[ProfiledStep], file: Path) -> None:
    """Writes a trace with a process per variant and rank."""
    trace = ChromeTrace()
    for step in steps:
        trace.add_process(_title(step), step.timeline)
    file.write_text(json.dumps(trace.to_json()))


def draw_block(point: Point, files: Sequence[Path]) -> None:
    """Draws the middle block of every variant on rank 0, one below the other, on one time scale."""
    num_blocks = point.case.workload.num_attentions
    middle = num_blocks // 2
    charts = [
        LaneChart(_title(step), step.block(middle, num_blocks))
        for step in point.profiled_steps
        if step.rank == 0
    ]
    rate = point.data["rate_mbit"]
    links = "" if rate is None else f", emulated links of {rate:.0f} Mbit/s"
    draw_charts(charts, f"block {middle + 1} of {num_blocks}: {point.title}{links}", files)


def _title(step: ProfiledStep) -> str:
    return f"{step.variant}, rank {step.rank}"
