# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a quality run: frontier, pictures, a table and the samples behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from cocodiff_compile.lab.quality.plot import saved
from cocodiff_compile.report.page.charts import ChartPoint, samples, scatter
from cocodiff_compile.report.page.document import document, render, write_file
from cocodiff_compile.report.page.sections import (
    Column,
    Drawing,
    Facts,
    Picture,
    Section,
    Table,
    Text,
)

_PAPER, _OURS, _EXACT = "#e0803c", "#4c6a92", "#7d7d7d"


def write_quality_page(
    results: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[Mapping[str, object]]],
    heads: Sequence[str],
    machine: Mapping[str, Any],
    pictures: Path,
    file: Path,
) -> None:
    """Writes a page with a group of sections for each result. `rows` are those of its table, and
    `pictures` shows those of the first result.
    """
    groups = [
        render(head, _sections(result, own, machine, pictures if place == 0 else None), place)
        for place, (result, own, head) in enumerate(zip(results, rows, heads, strict=True))
    ]
    write_file(file, document("cocodiff quality", heads[0], groups))


def _sections(
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, object]],
    machine: Mapping[str, Any],
    pictures: Path | None,
) -> list[Section]:
    others = result["variants"][1:]
    sections = [
        Section("Summary", "Summary", (_facts(result, others), _table(rows))),
        Section("Frontier", "Bytes against distance", _frontier(others),
                "Up is nearer to the exact run, right is fewer bytes; a line spans all pictures."),
    ]  # fmt: skip
    if pictures is not None:
        shown = Picture(pictures, "a row per policy, a column per picture; above each its PSNR")
        sections.append(Section("Pictures", "Pictures", (shown,)))
    times = [(item["name"], item["seconds"], _color(item["name"])) for item in result["variants"]]
    distances = [
        (item["name"], [d["psnr_db"] for d in item["distances"]], _color(item["name"]))
        for item in others
        if all(isfinite(d["psnr_db"]) for d in item["distances"])
    ]
    parts = [Drawing(samples(times, "s", None), "seconds of each run")]
    if distances:
        parts.append(Drawing(samples(distances, "dB", None), "PSNR of each picture"))
    sections.append(Section("Samples", "Samples", parts))
    about = [(name, str(value)) for name, value in [*result["settings"].items(), *machine.items()]]
    columns = (Column("what"), Column("value", is_wide=True))
    table = Table(columns, about, "settings and machine", has_filter=False)
    sections.append(Section("Settings", "Settings and machine", (table,), is_open=False))
    return sections


def _color(name: str) -> str:
    return _EXACT if name == "exact" else _PAPER if name.startswith("paper") else _OURS


def _facts(result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Facts:
    rate = result.get("rate_mbit")
    fewest = max(others, key=saved, default=None)
    items = [
        ("policies", str(len(others)), "beside the exact run"),
        ("links", "loopback" if rate is None else f"{rate:.0f} Mbit/s", f"{result['ranks']} ranks"),
    ]
    if fewest is not None:
        psnr = mean(item["psnr_db"] for item in fewest["distances"])
        items.append(("fewest bytes", f"1/{saved(fewest):.2f}", f"{fewest['name']}, {psnr:.1f} dB"))
    return Facts(items)


def _table(rows: Sequence[Mapping[str, object]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [Column(name, is_number=name not in ("policy", "steps")) for name in names]
    cells = [[row.get(name, "") for name in names] for row in rows]
    return Table(columns, cells, "policies, against the exact run", has_filter=len(rows) > 8)


def _frontier(others: Sequence[Mapping[str, Any]]) -> list[Drawing | Text]:
    points = []
    for variant in others:
        psnrs = [item["psnr_db"] for item in variant["distances"]]
        if all(map(isfinite, psnrs)):
            color = _color(variant["name"])
            point = (variant["name"], saved(variant), mean(psnrs), min(psnrs), max(psnrs), color)
            points.append(ChartPoint(*point))
    if not points:
        return [Text("No policy has pictures that differ from the exact ones.")]
    svg = scatter(points, "times fewer bytes than the exact run", "PSNR to the exact run, dB")
    return [Drawing(svg, "policies: the mean over all pictures")]
