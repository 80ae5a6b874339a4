"""Draws timelines: lanes of spans, in charts below each other on one time scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.report.chrome_trace import TraceSpan

_COLORS = {
    "matmul": "#4c6a92",
    "attention": "#2f4562",
    "kernel": "#8fb3d9",
    "start": "#c9a227",
    "wait": "#f1d9c8",
    "exchange": "#e0803c",
}
"""The color of each category of spans."""


@dataclass(frozen=True)
class LaneChart:
    """Describes one chart; `lanes` are the threads of the spans, from top to bottom."""

    title: str
    lanes: Sequence[str]
    spans: Sequence[TraceSpan]

    def between(self, begin_us: float, end_us: float) -> LaneChart:
        """Returns the part of the chart in a time interval, which then begins at 0."""
        inside = [
            TraceSpan(
                span.thread,
                span.name,
                span.category,
                max(span.start_us, begin_us) - begin_us,
                min(span.end_us, end_us) - max(span.start_us, begin_us),
            )
            for span in self.spans
            if span.end_us > begin_us and span.start_us < end_us
        ]
        return LaneChart(self.title, self.lanes, inside)


def draw_charts(charts: Sequence[LaneChart], title: str, files: Iterable[Path]) -> None:
    """Writes the same picture to every file, in the format of its suffix."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional)
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "a picture needs matplotlib: pip install 'cocodiff-compile[plots]'"
        ) from None
    height = sum(len(chart.lanes) for chart in charts)
    figure = Figure(figsize=(10, 1.6 + 0.42 * height), layout="constrained")
    all_axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(all_axes, charts, strict=True):
        _draw(axes, chart)
    all_axes[-1].set_xlabel("ms", fontsize=8)
    seen = {span.category for chart in charts for span in chart.spans}
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    for file in files:
        figure.savefig(file, dpi=150)


def _draw(axes: Any, chart: LaneChart) -> None:
    for span in chart.spans:
        axes.barh(
            chart.lanes.index(span.thread),
            span.duration_us / 1e3,
            left=span.start_us / 1e3,
            color=_COLORS[span.category],
            height=0.8,
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(chart.lanes)), chart.lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(chart.title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
