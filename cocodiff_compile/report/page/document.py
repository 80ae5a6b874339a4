# SPDX-License-Identifier: Apache-2.0
"""Puts sections together to one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from cocodiff_compile.report.page.sections import Blobs, Section

_FOLDER = Path(__file__).parent
_SCRIPTS = ("page.js", "tables.js", "chart.js", "timeline.js", "diff.js", "heatmap.js")


@dataclass(frozen=True)
class Rendered:
    """Sections as markup, with their data: what is left of them between two writes of a page."""

    name: str
    links: str
    body: str
    data: str

    def __add__(self, other: Rendered) -> Rendered:
        """Returns the sections of both under the name of the first."""
        return Rendered(
            self.name, self.links + other.links, self.body + other.body, self.data + other.data
        )


def render(name: str, sections: Sequence[Section], number: int = 0, part: str = "") -> Rendered:
    """Returns a group of sections, of which a page shows one at a time. `number` is another one for
    each group of a page, `part` another one for what is added to a group.
    """
    blobs, prefix = Blobs(prefix=f"d{number}{part}-"), f"g{number}-"
    body = "".join(section.html(blobs, prefix) for section in sections)
    links = "".join(_link(section, prefix) for section in sections)
    data = "".join(
        f'<script type="text/plain" id="{key}">{text}</script>' for key, text in blobs.texts.items()
    )
    return Rendered(name, links, body, data)


def _link(section: Section, prefix: str) -> str:
    count = f' <span class="badge">{section.count}</span>' if section.count is not None else ""
    return (
        f'<li><a href="#{escape(prefix + section.anchor)}">{escape(section.name)}{count}</a></li>'
    )


def document(title: str, subtitle: str, groups: Sequence[Rendered], first: int = 0) -> str:
    """Returns the text of the file. `first` is the group that is shown when it is opened."""
    picker, links, bodies = "", "", ""
    if len(groups) > 1:
        options = "".join(
            f'<option value="{place}"{" selected" if place == first else ""}>{escape(item.name)}'
            for place, item in enumerate(groups)
        )
        picker = f'<label class="picker">Graph <select id="picker">{options}</select></label>'
    for place, item in enumerate(groups):
        hidden = "" if place == first else " hidden"
        links += f'<ul data-group="{place}"{hidden}>{item.links}</ul>'
        bodies += f'<div class="group" data-group="{place}"{hidden}>{item.body}</div>'
    return _template().format(
        title=escape(title),
        subtitle=escape(subtitle),
        picker=picker,
        links=links,
        body=bodies,
        data="".join(item.data for item in groups),
        css=_asset("page.css"),
        script="\n".join(map(_asset, _SCRIPTS)),
    )


def write_file(path: Path, text: str) -> None:
    """Writes a file such that a reader finds the whole of it, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@functools.cache
def _template() -> str:
    return _asset("page.html")


@functools.cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
