"""Profiled steps of all ranks and ways: one file for Perfetto, one picture of one block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocodiff_compile.bench.profile import Span, Timeline
from cocodiff_compile.bench.results import Point, Report
from cocodiff_compile.report.chrome_trace import ChromeTrace, TraceSpan

_COLORS = {
    "matmul": "#4c6a92",
    "attention": "#2f4562",
    "kernel": "#8fb3d9",
    "start": "#c9a227",
    "wait": "#f1d9c8",
    "exchange": "#e0803c",
}


def draw_timelines(report: Report, folder: Path) -> list[Path]:
    """Writes a trace and a picture of the middle block per point; returns what was written."""
    written: list[Path] = []
    for number, point in enumerate(report.points):
        stem = "timeline" if number == 0 else f"timeline_{number}"
        trace, pictures = folder / f"{stem}.json", [folder / f"{stem}{s}" for s in (".svg", ".png")]
        write_trace(point.timelines, trace)
        draw_block(point, pictures)
        written += [trace, *pictures]
    return written


def write_trace(timelines: Sequence[Timeline], file: Path) -> None:
    """A process per way and rank."""
    trace = ChromeTrace()
    for timeline in timelines:
        spans = (
            TraceSpan(span.lane, span.name, span.kind, span.start_us, span.duration_us)
            for span in timeline.spans
        )
        trace.add_process(f"{timeline.way}, rank {timeline.rank}", timeline.lanes, spans)
    file.write_text(json.dumps(trace.to_json()))


def draw_block(point: Point, files: Sequence[Path]) -> None:
    """The middle block of every way on rank 0, one below the other, on one scale of time."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)
    from matplotlib.patches import Patch  # noqa: PLC0415

    timelines = [timeline for timeline in point.timelines if timeline.rank == 0]
    num_blocks = point.case.workload.num_attentions
    height = sum(len(timeline.lanes) for timeline in timelines)
    figure = Figure(figsize=(10, 1.6 + 0.42 * height), layout="constrained")
    all_axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline in zip(all_axes, timelines, strict=True):
        _draw_lanes(axes, timeline, timeline.block(num_blocks // 2, num_blocks))
    all_axes[-1].set_xlabel("ms", fontsize=8)
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    rate = point.data["rate_mbit"]
    links = "" if rate is None else f", emulated links of {rate:.0f} Mbit/s"
    title = f"block {num_blocks // 2 + 1} of {num_blocks}: {point.title}{links}"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    for file in files:
        figure.savefig(file, dpi=150)


def _draw_lanes(axes: Any, timeline: Timeline, spans: Sequence[Span]) -> None:
    lanes = timeline.lanes
    for span in spans:
        axes.barh(
            lanes.index(span.lane),
            span.duration_us / 1e3,
            left=span.start_us / 1e3,
            color=_COLORS[span.kind],
            height=0.8,
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{timeline.way}, rank {timeline.rank}", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
