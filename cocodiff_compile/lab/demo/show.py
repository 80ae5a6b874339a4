# SPDX-License-Identifier: Apache-2.0
"""Writes the demo's pictures, timelines, data and page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocodiff_compile.lab.bench.machine import describe_machine
from cocodiff_compile.lab.bench.plot import write_trace
from cocodiff_compile.lab.bench.profile import ProfiledStep
from cocodiff_compile.lab.demo.outcome import Outcome, title_of
from cocodiff_compile.lab.demo.page import write_demo_page
from cocodiff_compile.lab.quality.command import plain
from cocodiff_compile.lab.quality.plot import plot_pictures
from cocodiff_compile.lab.quality.ranks import distances
from cocodiff_compile.report.lane_charts import LaneChart, draw_charts


def write_files(outcome: Outcome, folder: Path) -> dict[str, Path]:
    """Returns the files by what they show."""
    files = {
        "pictures": folder / "pictures.png",
        "timelines": folder / "timeline.svg",
        "trace": folder / "timeline.json",
        "data": folder / "results.json",
        "page": folder / "index.html",
    }
    plot_pictures({"variants": _shown_variants(outcome)}, files["pictures"])
    steps = profiled_steps(outcome)
    first = [step for step in steps if step.rank == 0]
    charts = [LaneChart(_title(step), step.timeline) for step in first]
    title = f"one call of the model, as profiled on the first rank; {outcome.links}"
    draw_charts(charts, title, [files["timelines"], folder / "timeline.png"])
    write_trace(steps, files["trace"])
    data = _data(outcome)
    files["data"].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    write_demo_page(outcome, first, files["pictures"], data["machine"], files["page"])
    return files


def profiled_steps(outcome: Outcome) -> list[ProfiledStep]:
    """Returns one call of every variant on every rank."""
    return [ProfiledStep.from_json(item) for item in outcome.result["profiled_steps"]]


def _title(step: ProfiledStep) -> str:
    line = step.timeline
    name, step_ms, exposed_ms = title_of(step.variant), line.step_s * 1e3, line.exposed_s * 1e3
    return f"{name}: {step_ms:.0f} ms, of which {exposed_ms:.0f} ms wait for exchanges"


def _shown_variants(outcome: Outcome) -> list[dict[str, Any]]:
    truth = outcome.one_process.pictures
    rows = [{"name": "one process", "pictures": truth}]
    for variant in outcome.result["variants"]:
        off = [item.to_json() for item in distances(variant["pictures"], truth)]
        shown = {"pictures": variant["pictures"], "distances": off}
        rows.append({"name": title_of(variant["name"]), **shown})
    return rows


def _data(outcome: Outcome) -> Mapping[str, Any]:
    rest = {key: value for key, value in outcome.result.items() if key != "profiled_steps"}
    return {
        "machine": describe_machine(),
        "one process": {"step_s": outcome.one_process.step_s},
        "table": outcome.table,
        **{**rest, "variants": [plain(variant) for variant in rest["variants"]]},
    }
