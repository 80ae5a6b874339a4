# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a demo: the table, the pictures, and a timeline of one call of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.lab.bench.profile import ProfiledStep
from cocodiff_compile.lab.demo.outcome import Outcome, title_of
from cocodiff_compile.report.page.charts import samples
from cocodiff_compile.report.page.document import document, render, write_file
from cocodiff_compile.report.page.sections import (
    Column,
    Drawing,
    Facts,
    Picture,
    Section,
    Table,
    Text,
    TimelineChart,
)

_NANOSECONDS = 1e9
_LEAD = (
    "A small FLUX that was trained to draw two shapes. {links}; ranks share the cores of one "
    "machine. Traffic, code and pictures are real."
)
_EMULATED = "Links between the nodes are emulated, and slow"
_LOOPBACK = "Ranks talk over loopback, where exchanges take hardly any time"


def write_demo_page(
    outcome: Outcome,
    steps: Sequence[ProfiledStep],
    pictures: Path,
    machine: Mapping[str, Any],
    file: Path,
) -> None:
    """Writes one HTML file that needs no other."""
    lead = _LEAD.format(links=_EMULATED if outcome.result["rate_mbit"] else _LOOPBACK)
    sections = [
        Section("Summary", "Summary", (_facts(outcome), _table(outcome.table)), lead),
        Section("Pictures", "Pictures, and how far they are from one process",
                (Picture(pictures, "a row per variant; above a picture its PSNR"),)),
        Section("Timeline", "One call of the model, as profiled on the first rank",
                (TimelineChart({"charts": [_chart(step) for step in steps]},
                               "A call of the model by each variant"),),
                "Both lanes of exchanges are threads of the process group. Waiting is what stays "
                "exposed."),
        Section("Samples", "All rounds", (_samples(outcome),)),
        Section("Compile", "How it was compiled", (_where_to_look(outcome),)),
        Section("Settings", "Settings and machine", (_settings(outcome, machine),), is_open=False),
    ]  # fmt: skip
    write_file(file, document("cocodiff demo", outcome.links, [render("demo", sections)]))


def _facts(outcome: Outcome) -> Facts:
    _, stock, exact, lossy = outcome.rows
    bits = "the same bits" if outcome.keeps_bits else "not the same bits"
    return Facts(
        [
            ("exact", f"{exact.speedup:.2f}x", f"over stock Inductor, {bits}"),
            ("V-Major", f"{lossy.speedup:.2f}x", f"over stock Inductor, {lossy.mean_db:.1f} dB"),
            ("stock Inductor", f"{stock.step_s * 1e3:.0f} ms", "per step"),
            ("one process", f"{outcome.rows[0].step_s * 1e3:.0f} ms", "per step, eager"),
        ]
    )


def _table(rows: Sequence[Mapping[str, object]]) -> Table:
    columns = [Column(name, is_number=bool(name)) for name in rows[0]]
    return Table(columns, [list(row.values()) for row in rows], "variants", has_filter=False)


def _samples(outcome: Outcome) -> Drawing:
    runs = [(title_of(item["name"]), item["seconds"]) for item in outcome.result["variants"]]
    rows = [(name, seconds, "#4c6a92" if place else "#7d7d7d")
            for place, (name, seconds) in enumerate(runs)]  # fmt: skip
    return Drawing(samples(rows, "s", None), "seconds of each run, interleaved")


def _where_to_look(outcome: Outcome) -> Text:
    folder = outcome.result["settings"]["debug_dir"]
    exact, lossy = (item["name"] for item in outcome.result["variants"][1:])
    return Text(
        f"{folder}/{exact}/rank_000/index.html shows what each pass did to the graph; "
        f"{folder}/{lossy}/rank_000/index.html also shows what V-Major sent in each step."
    )


def _settings(outcome: Outcome, machine: Mapping[str, Any]) -> Table:
    about = [*outcome.result["settings"].items(), *machine.items()]
    rows = [(name, str(value)) for name, value in about]
    columns = (Column("what"), Column("value", is_wide=True))
    return Table(columns, rows, "settings and machine", has_filter=False)


def _chart(step: ProfiledStep) -> dict[str, Any]:
    """Returns a measured call in the form of an estimated one: every span is a task of its own."""
    line, title = step.timeline, title_of(step.variant)
    lanes = line.lanes
    spans = sorted(line.spans, key=lambda span: (lanes.index(span.lane), span.begin_s))
    count = len(spans)
    empty = {key: [""] * count for key in ("module", "value", "role")}
    zeros = {key: [0] * count for key in ("bytes", "light_ns")}
    ones = {key: [-1] * count for key in ("site", "of")}
    lasts = [_ns(span.seconds) for span in spans]
    names = [span.name for span in spans]
    return {
        "title": title,
        **_sums(line),
        "lanes": lanes,
        "spans": {
            "lane": [lanes.index(span.lane) for span in spans],
            "kind": [span.kind for span in spans],
            "at": [_ns(span.begin_s) for span in spans],
            "for": lasts,
            "task": list(range(count)),
        },
        "tasks": {"name": names, "op": names, "own_ns": lasts, **empty, **zeros, **ones},
        "exchanges": [
            {
                "task": place,
                "begin_ns": _ns(span.begin_s),
                "end_ns": _ns(span.end_s),
                "queued_ns": 0,
                "exposed_ns": 0,
                "behind": [],
            }
            for place, span in enumerate(spans)
            if span.kind == "exchange"
        ],
    }


def _sums(line: Timeline) -> dict[str, int]:
    return {
        "step_ns": _ns(line.step_s),
        "compute_ns": _ns(line.compute_s),
        "exposed_ns": _ns(line.exposed_s),
        "in_flight_ns": _ns(line.in_flight_s),
    }


def _ns(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)
