# SPDX-License-Identifier: Apache-2.0
"""Plots a run: step time by share of communication, exposed communication, profiled steps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocodiff_compile.lab.bench.profile import ProfiledStep
from cocodiff_compile.lab.bench.results import Point, Report, VariantResult
from cocodiff_compile.report.chrome_trace import ChromeTrace
from cocodiff_compile.report.lane_charts import LaneChart, draw_charts

_COLORS = ("#4c6a92", "#8fb3d9", "#e0803c", "#c9a227", "#6f9e6f", "#a05a7a", "#7d7d7d", "#3b8686")
_COMPUTE, _EXPOSED, _LIMIT = "#4c6a92", "#e0803c", "#222222"


def plot_report(report: Report, folder: Path) -> list[Path]:
    """Writes `steps.png` and `exposed.png`; returns the paths written."""
    by_case = itertools.groupby(report.points, key=lambda point: point.case.title)
    panels = {title: list(points) for title, points in by_case}
    if not panels:
        return []
    titles = dict.fromkeys(variant.title for point in report.points for variant in point.ready)
    colors = dict(zip(titles, itertools.cycle(_COLORS), strict=False))
    written = []
    for name, draw in (("steps.png", _draw_steps), ("exposed.png", _draw_exposed)):
        figure, all_axes = _figure(len(panels))
        for axes, (title, points) in zip(all_axes, panels.items(), strict=True):
            draw(axes, points, colors)
            axes.set_title(title, loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        handles, labels = all_axes[0].get_legend_handles_labels()
        columns = 1 + len(panels) if len(panels) < 3 else 5
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
        figure.suptitle(_subtitle(report), fontsize=9, x=0.01, ha="left")
        figure.savefig(folder / name, dpi=150)
        written.append(folder / name)
    return written


def _figure(num_panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    columns = min(3, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(1.2 + 4.6 * columns, 0.9 + 3.6 * rows), layout="constrained")
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in cells[num_panels:]:
        unused.set_axis_off()
    return figure, cells[:num_panels]


def _subtitle(report: Report) -> str:
    machine = report.data["machine"]
    links = any(point.data["rate_mbit"] is not None for point in report.points)
    where = "emulated links, gloo" if links else "links as they are"
    return f"{where}; {machine['cores']} cores, {machine['processor']}, torch {machine['torch']}"


def _label(point: Point) -> str:
    share, rate = point.data["share"], point.data["rate_mbit"]
    if rate is None:
        return "as is"
    return f"{rate:.0f} Mbit/s" if share is None else f"{share} %\n{rate:.0f} Mbit/s"


def _draw_steps(axes: Any, points: Sequence[Point], colors: dict[str, str]) -> None:
    """Draws medians, with error bars from the minimum to the upper quartile of all rounds."""
    for number, (title, color) in enumerate(colors.items()):
        ready = [(x, variant) for x, point in enumerate(points) for variant in point.ready]
        mine = [(x, variant) for x, variant in ready if variant.title == title]
        shift = 0.07 * (number - (len(colors) - 1) / 2)
        axes.errorbar(
            [x + shift for x, _ in mine],
            [variant.step_s * 1e3 for _, variant in mine],
            yerr=_errors([variant for _, variant in mine]),
            color=color,
            marker="o",
            markersize=4,
            linewidth=1.2,
            linestyle=":",
            capsize=2,
            label=title,
        )
    limits = [point.limit_s * 1e3 for point in points]
    axes.plot(range(len(points)), limits, color=_LIMIT, linestyle="--", linewidth=1, label="limit")
    axes.set_yscale("log")
    axes.set_ylabel("ms per step", fontsize=8)
    axes.set_xticks(range(len(points)), [_label(point) for point in points], fontsize=8)
    axes.margins(x=0.1)


def _errors(variants: Sequence[VariantResult]) -> list[list[float]]:
    """Returns the milliseconds from the step down to the minimum and up to the upper quartile."""
    below = [(variant.step_s - variant.least_s) * 1e3 for variant in variants]
    return [below, [(variant.upper_s - variant.step_s) * 1e3 for variant in variants]]


def _draw_exposed(axes: Any, points: Sequence[Point], _colors: dict[str, str]) -> None:
    """Draws computation and exposed communication as stacked bars, and the limit as a line."""
    bars: dict[float, VariantResult] = {}
    left = 0.0
    for point in points:
        bars.update((left + place, variant) for place, variant in enumerate(point.ready))
        begin, end = left - 0.5, left + len(point.ready) - 0.5
        label = "limit" if point is points[0] else None
        axes.hlines(point.limit_s * 1e3, begin, end, _LIMIT, "--", linewidth=1, label=label)
        top = max((variant.upper_s for variant in point.ready), default=0.0) * 1e3
        middle = (begin + end) / 2, top
        axes.annotate(
            _label(point), middle, (0, 6), textcoords="offset points", fontsize=8, ha="center"
        )
        left += len(point.ready) + 0.8
    variants = list(bars.values())
    compute = [variant.compute_s * 1e3 for variant in variants]
    exposed = [max(0.0, variant.step_s - variant.compute_s) * 1e3 for variant in variants]
    axes.bar(list(bars), compute, 0.85, color=_COMPUTE, label="computation")
    axes.bar(
        list(bars),
        exposed,
        0.85,
        compute,
        color=_EXPOSED,
        yerr=_errors(variants),
        error_kw={"elinewidth": 1, "capsize": 2},
        label="exposed communication",
    )
    names = [variant.name for variant in variants]
    axes.set_xticks(list(bars), names, fontsize=7, rotation=90)
    axes.set_ylabel("ms per step", fontsize=8)
    axes.margins(y=0.15)


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
        trace.add_process(step.title, step.timeline)
    file.write_text(json.dumps(trace.to_json()))


def draw_block(point: Point, files: Sequence[Path]) -> None:
    """Draws the middle block of every variant on rank 0, one below the other, on one time scale."""
    num_blocks = point.case.workload.num_attentions
    middle = num_blocks // 2
    charts = [
        LaneChart(step.title, step.block(middle, num_blocks))
        for step in point.profiled_steps
        if step.rank == 0
    ]
    rate = point.data["rate_mbit"]
    links = "" if rate is None else f", emulated links of {rate:.0f} Mbit/s"
    draw_charts(charts, f"block {middle + 1} of {num_blocks}: {point.title}{links}", files)
