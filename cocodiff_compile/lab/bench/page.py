# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a benchmark: for each point its table, its samples, and what to doubt."""

from __future__ import annotations

from pathlib import Path

from cocodiff_compile.lab.bench.results import Point, Report
from cocodiff_compile.lab.bench.table import head_of_point, row_of_variant
from cocodiff_compile.report.page.charts import samples
from cocodiff_compile.report.page.document import document, render, write_file
from cocodiff_compile.report.page.sections import (
    Card,
    Column,
    Drawing,
    Facts,
    Part,
    Picture,
    Section,
    Table,
    Text,
)

_COLORS = {"stock": "#7d7d7d", "rival": "#8fb3d9", "ours": "#e0803c"}


def write_bench_page(report: Report, pictures: list[Path], file: Path) -> None:
    """Writes a page with a section per point; `pictures` are those of the whole run."""
    sections = [_summary(report), *map(_point, range(len(report.points)), report.points)]
    if pictures:
        shown = [Picture(path, path.stem) for path in pictures if path.suffix == ".png"]
        sections.insert(1, Section("Pictures", "All points", shown))
    machine = report.data["machine"]
    subtitle = f"{len(report.points)} points; {machine['cores']} cores, {machine['processor']}"
    write_file(file, document("cocodiff bench", subtitle, [render("bench", sections)]))


def _summary(report: Report) -> Section:
    rows = [(name, str(value)) for name, value in report.data["machine"].items()]
    parts: list[Part] = [_gains(report)]
    parts += [
        Card("bad", "not measured", title, title, failure, ("Run it again with --resume.",))
        for title, failure in report.failures
    ]
    table = Table((Column("machine"), Column("", is_wide=True)), rows, "machine", has_filter=False)
    return Section("Summary", "Summary", [*parts, table])


def _gains(report: Report) -> Facts:
    gains = [
        (gain, point.title, variant.title)
        for point in report.points
        for variant in point.ready
        if variant.kind == "ours" and (gain := point.over_stock(variant)) is not None
    ]
    doubtful = sum(bool(point.warnings) for point in report.points)
    items = [
        ("points", str(len(report.points)), f"{doubtful} with warnings"),
        ("failures", str(len(report.failures)), "cases that could not be measured"),
    ]
    if gains:
        best, where, who = max(gains)
        items.insert(0, ("most over stock", f"{best:.2f}x", f"{who}: {where}"))
    return Facts(items)


def _point(number: int, point: Point) -> Section:
    first, limit = head_of_point(point).split("\n")
    parts: list[Part] = [
        Card("warn", "doubtful", text.split(":")[0], point.title, text, (_REMEDY,))
        for text in point.warnings
    ]
    parts.append(_table(point))
    if point.ready:
        rows = [
            (variant.title, [1e3 * value for value in variant.samples_s], _color(variant.kind))
            for variant in point.ready
        ]
        svg = samples(rows, "ms", 1e3 * point.limit_s)
        parts.append(Drawing(svg, "each round of each variant; the dashed line is the limit"))
    parts += [Text(f"{item.title}: {item.reason}") for item in point.variants if item.reason]
    return Section(f"Point {number + 1}", point.title, parts, f"{first}. {limit}")


_REMEDY = "Measure again on a quieter machine, with more --repeats."


def _color(kind: str) -> str:
    return _COLORS.get(kind, "#4c6a92")


def _table(point: Point) -> Table:
    rows = [row_of_variant(point, variant) for variant in point.variants]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [Column(name, is_number=name != "variant") for name in names]
    cells = [[row.get(name, "") for name in names] for row in rows]
    return Table(columns, cells, "variants", has_filter=False)
