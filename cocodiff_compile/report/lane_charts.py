# SPDX-License-Identifier: Apache-2.0
"""Draws timelines: lanes of spans, in charts below each other on one time scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocodiff_compile.cost.timeline import SpanKind, Timeline
from cocodiff_compile.errors import UserError

_COLORS: dict[SpanKind, str] = {
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
    """A timeline under a title."""

    title: str
    timeline: Timeline


def draw_charts(charts: Sequence[LaneChart], title: str, files: Iterable[Path]) -> None:
    """Writes the same picture to every file, in the format of its suffix."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional)
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "a picture needs matplotlib: pip install 'cocodiff-compile[plots]'"
        ) from None
    height = sum(len(chart.timeline.lanes) for chart in charts)
    figure = Figure(figsize=(10, 1.6 + 0.42 * height), layout="constrained")
    all_axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(all_axes, charts, strict=True):
        _draw(axes, chart)
    all_axes[-1].set_xlabel("ms", fontsize=8)
    seen = {span.kind for chart in charts for span in chart.timeline.spans}
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    for file in files:
        figure.savefig(file, dpi=150)


def _draw(axes: Any, chart: LaneChart) -> None:
    lanes = chart.timeline.lanes
    for span in chart.timeline.spans:
        axes.barh(
            lanes.index(span.lane),
            span.seconds * 1e3,
            left=span.begin_s * 1e3,
            color=_COLORS[span.kind],
            height=0.8,
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(chart.title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
