# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a rank, `index.html` in its folder, after every graph that it compiles."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cocodiff_compile.report.compile_page import (
    graph_name,
    graph_sections,
    page_title,
    run_sections,
)
from cocodiff_compile.report.page.document import Rendered, document, render, write_file
from cocodiff_compile.say_once import say_once

log = logging.getLogger(__name__)

PAGE_NAME = "index.html"


_HEAD = ("rank", "versions", "summary", "num_nodes", "options", "kind")
"""What the head of a page needs to know of each graph."""


@dataclass
class RankPage:
    """Keeps the graphs of a rank as they stand on its page, in few bytes."""

    file: Path
    _packed: dict[tuple[int, str], bytes] = field(default_factory=dict)
    """All that is known of each graph, by its number and kind of step."""
    _heads: dict[tuple[int, str], Mapping[str, Any]] = field(default_factory=dict)
    _rendered: dict[tuple[int, str], Rendered] = field(default_factory=dict)
    _runs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What was recorded of each graph while it ran, by its number."""

    def add(self, page: Mapping[str, Any]) -> None:
        """Adds a graph, or replaces it, and writes the file. One that cannot be written is logged
        once: the other ranks would wait for a rank that fails.
        """
        key = (page["graph"], page["kind"])
        place = list(self._rendered).index(key) if key in self._rendered else len(self._rendered)
        self._packed[key] = zlib.compress(json.dumps(page).encode(), 1)
        self._heads[key] = {name: page[name] for name in _HEAD}
        self._rendered[key] = render(graph_name(page, place), graph_sections(page), place)
        self._write()

    def update(self, number: int, kind: str, **more: Any) -> None:
        """Adds to what is known of a graph, if the page has it, and writes the file again."""
        if packed := self._packed.get((number, kind)):
            self.add({**json.loads(zlib.decompress(packed)), **more})

    def show_run(self, number: int, recorded: Mapping[str, Any]) -> None:
        """Shows what was recorded of a graph while it ran, and writes the file again."""
        self._runs[number] = recorded
        self._write()

    def _write(self) -> None:
        heads = list(self._heads.values())
        groups = [
            rendered + _rendered_run(self._heads[key], self._runs.get(key[0]), place)
            for place, (key, rendered) in enumerate(self._rendered.items())
        ]
        try:
            write_file(self.file, document(*page_title(heads), groups, _largest(heads)))
        except OSError as error:
            say_once(log, logging.WARNING, f"debug_dir: {self.file} was not written: {error}")


def _rendered_run(
    page: Mapping[str, Any], recorded: Mapping[str, Any] | None, place: int
) -> Rendered:
    return render("", run_sections(page, recorded), place, part="run")


def _largest(pages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the place of the graph that a page shows first: the one with most to see."""
    weights = [
        (len(page["summary"]["sites"]) + len(page["summary"]["declined"]), page["num_nodes"])
        for page in pages
    ]
    return weights.index(max(weights)) if weights else 0


def write_page(pages: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Writes a page of these graphs, or with `.json` their data. Raises OSError if the file cannot
    be written.
    """
    if file.suffix == ".json":
        return write_file(file, json.dumps({"graphs": list(pages)}) + "\n")
    groups = [
        render(graph_name(page, place), graph_sections(page), place)
        + _rendered_run(page, None, place)
        for place, page in enumerate(pages)
    ]
    return write_file(file, document(*page_title(pages), groups, _largest(pages)))


_rank_pages: dict[Path, RankPage] = {}


def rank_page(folder: Path) -> RankPage:
    """Returns the page in the folder of a rank; the same one for all graphs of this process."""
    return _rank_pages.setdefault(folder, RankPage(folder / PAGE_NAME))
