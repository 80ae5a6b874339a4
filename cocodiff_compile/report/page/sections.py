# SPDX-License-Identifier: Apache-2.0
"""Defines what a page is made of. All that a caller gives is text and is escaped; only `Drawing`
takes markup, of our own code.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, Protocol

Tone = Literal["", "good", "warn", "bad", "faint"]


class Part(Protocol):
    """Anything that stands in a section."""

    def html(self, blobs: Blobs) -> str:
        """Returns markup; large data go into `blobs`."""
        ...


@dataclass
class Blobs:
    """Collects data that the page unpacks when they are looked at: compressed, as text."""

    texts: dict[str, str] = field(default_factory=dict)
    prefix: str = "d"

    def add(self, data: Any) -> str:
        """Returns the name under which the page finds these plain data."""
        name = f"{self.prefix}{len(self.texts)}"
        packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
        self.texts[name] = base64.b64encode(packed).decode()
        return name


@dataclass(frozen=True)
class Cell:
    """A cell of a table, sorted by `sort` where that is given; `hint` shows up beside the mouse."""

    text: str
    sort: float | None = None
    tone: Tone = ""
    hint: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table; `hint` says what it holds."""

    name: str
    is_number: bool = False
    hint: str = ""
    is_code: bool = False
    is_wide: bool = False
    """Whether its cells are sentences, which break into lines."""


@dataclass(frozen=True)
class Table:
    """Rows that can be sorted and filtered. Cells are texts, numbers or `Cell`."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    caption: str
    has_filter: bool = True

    def html(self, _blobs: Blobs) -> str:
        heads = "".join(_head(column) for column in self.columns)
        rows = "".join(_row(self.columns, row) for row in self.rows)
        box = _filter_box(self.caption, len(self.rows)) if self.has_filter else ""
        kind = "table long" if len(self.rows) > 40 else "table"
        return (
            f'<div class="{kind}" data-rows="{len(self.rows)}">{box}'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}">'
            f"<table><caption>{escape(self.caption)}</caption>"
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></div>"
        )


def _filter_box(caption: str, count: int) -> str:
    return (
        f'<div class="tools"><label>Filter <input type="search" class="filter" '
        f'aria-label="Filter: {escape(caption)}" placeholder="module, reason, number ..."></label>'
        f'<span class="count" role="status">{count} rows</span></div>'
    )


def _head(column: Column) -> str:
    kind = ' class="number"' if column.is_number else ""
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    return f'<th scope="col"{kind}{hint}><button type="button">{escape(column.name)}</button></th>'


def _row(columns: Sequence[Column], row: Sequence[object]) -> str:
    cells = (_cell(column, value) for column, value in zip(columns, row, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _cell(column: Column, value: object) -> str:
    cell = value if isinstance(value, Cell) else Cell("" if value is None else str(value))
    kinds = {"number": column.is_number, "code": column.is_code, "wide": column.is_wide}
    names = [name for name, holds in kinds.items() if holds]
    names += [cell.tone] if cell.tone else []
    kind = f' class="{" ".join(names)}"' if names else ""
    sort = f' data-sort="{cell.sort:g}"' if cell.sort is not None else ""
    hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
    return f"<td{kind}{sort}{hint}>{escape(cell.text)}</td>"


@dataclass(frozen=True)
class Text:
    """Paragraphs of plain text; `is_code` keeps lines as they are."""

    text: str
    is_code: bool = False

    def html(self, _blobs: Blobs) -> str:
        if self.is_code:
            return f"<pre>{escape(self.text)}</pre>"
        return "".join(f"<p>{escape(part)}</p>" for part in self.text.split("\n\n") if part)


@dataclass(frozen=True)
class Facts:
    """Figures under their names, as tiles: name, figure, and what stands below it."""

    items: Sequence[tuple[str, str, str]]

    def html(self, _blobs: Blobs) -> str:
        tiles = (
            f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}</dd>"
            f'<dd class="faint">{escape(more)}</dd></div>'
            for name, figure, more in self.items
        )
        return f'<dl class="facts">{"".join(tiles)}</dl>'


@dataclass(frozen=True)
class Card:
    """One thing to look at: a title with its kind, where, why, and what can be done."""

    tone: Tone
    kind: str
    title: str
    where: str
    why: str
    remedies: Sequence[str]

    def html(self, _blobs: Blobs) -> str:
        remedies = "".join(f"<li>{escape(item)}</li>" for item in self.remedies)
        return (
            f'<article class="card {self.tone}"><h3><span class="kind">{escape(self.kind)}</span> '
            f"{escape(self.title)}</h3><dl><dt>Where</dt><dd><code>{escape(self.where)}</code></dd>"
            f"<dt>Why</dt><dd>{escape(self.why)}</dd>"
            f'<dt>What to do</dt><dd><ol class="remedies">{remedies}</ol></dd></dl></article>'
        )


@dataclass(frozen=True)
class TimelineChart:
    """Timelines below each other on one scale, of `page_data.describe_order`."""

    data: Mapping[str, Any]
    label: str

    def html(self, blobs: Blobs) -> str:
        return (
            f'<div class="timeline" data-blob="{blobs.add(self.data)}" '
            f'data-label="{escape(self.label)}"><p class="loading">unpacking ...</p></div>'
        )


@dataclass(frozen=True)
class DiffView:
    """Stages of a text, each compared with the one before; see `graph_text.stages_data`."""

    data: Mapping[str, Any]
    label: str

    def html(self, blobs: Blobs) -> str:
        stages = self.data["stages"]
        rows = "".join(
            f"<tr><td>{escape(item['name'])}</td>"
            f'<td class="number">{item["added"]}</td><td class="number">{item["removed"]}</td>'
            f'<td class="number">{item["moved"]}</td></tr>'
            for item in stages
        )
        table = (
            "<table><caption>what each pass changed</caption><thead><tr><th scope='col'>stage</th>"
            "<th scope='col' class='number'>lines added</th><th scope='col' class='number'>removed"
            "</th><th scope='col' class='number'>moved</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
        return (
            f'<div class="scroll short">{table}</div><div class="diff" '
            f'data-blob="{blobs.add(self.data)}" data-label="{escape(self.label)}">'
            '<p class="loading">unpacking ...</p></div>'
        )


@dataclass(frozen=True)
class HeatMap:
    """A square for each row and column, the darker the larger its value: a part of one, None where
    there is none. `power` below 1 tells small values apart.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    caption: str
    column: str
    """What a column is called: step."""
    word: str
    """What values are parts of: sent."""
    color: str = "matmul"
    power: float = 1.0

    def html(self, blobs: Blobs) -> str:
        names = ("rows", "columns", "values", "column", "word", "color", "power")
        blob = blobs.add({name: getattr(self, name) for name in names})
        caption = escape(self.caption)
        return (
            f'<figure><div class="heatmap" data-blob="{blob}" data-label="{caption}">'
            f'<p class="loading">unpacking ...</p></div><figcaption>{caption}</figcaption></figure>'
        )


@dataclass(frozen=True)
class Drawing:
    """A drawing as SVG markup of our own code, which has escaped what is in it."""

    svg: str
    caption: str = ""

    def html(self, _blobs: Blobs) -> str:
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        return (
            f'<figure><div class="scroll" tabindex="0" role="region" '
            f'aria-label="{escape(self.caption or "drawing")}">{self.svg}</div>{caption}</figure>'
        )


@dataclass(frozen=True)
class Legend:
    """Colors with a name and what it stands for."""

    items: Sequence[tuple[str, str, str]]

    def html(self, _blobs: Blobs) -> str:
        lines = (
            f'<li><svg width="22" height="10" aria-hidden="true"><rect width="22" height="10" '
            f'rx="2" fill="{escape(color)}"/></svg> <b>{escape(name)}</b> {escape(more)}</li>'
            for color, name, more in self.items
        )
        return f'<ul class="legend">{"".join(lines)}</ul>'


_KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


@dataclass(frozen=True)
class Picture:
    """A picture, which becomes part of the page."""

    file: Path
    caption: str

    def html(self, _blobs: Blobs) -> str:
        data = base64.b64encode(self.file.read_bytes()).decode()
        source = f"data:{_KINDS[self.file.suffix.lower()]};base64,{data}"
        return (
            f'<figure><img src="{source}" alt="{escape(self.caption)}" loading="lazy">'
            f"<figcaption>{escape(self.caption)}</figcaption></figure>"
        )


@dataclass(frozen=True)
class Section:
    """A part of a page with a title, listed by its name beside it. `lead` says what it shows."""

    name: str
    title: str
    parts: Sequence[Part]
    lead: str = ""
    count: int | None = None
    """The number beside the title in the list of sections."""
    is_open: bool = True
    prints_open: bool = True
    """Whether a closed section is opened for print: those that are long are not."""

    @property
    def anchor(self) -> str:
        """Returns the name for links."""
        return self.name.lower().replace(" ", "-")

    def html(self, blobs: Blobs, prefix: str = "") -> str:
        """Returns the section, which can be folded."""
        lead = f'<p class="lead">{escape(self.lead)}</p>' if self.lead else ""
        body = "".join(part.html(blobs) for part in self.parts)
        is_open = " open" if self.is_open else ""
        prints = "" if self.prints_open else ' data-print="no"'
        return (
            f'<details class="section" id="{escape(prefix + self.anchor)}"{is_open}{prints}>'
            f"<summary><h2>{escape(self.title)}</h2></summary>{lead}{body}</details>"
        )
