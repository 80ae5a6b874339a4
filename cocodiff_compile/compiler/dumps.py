# SPDX-License-Identifier: Apache-2.0
"""Writes one graph down while it is compiled: into `debug_dir`, into the trace, on a page."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.pipeline.run_passes import Observer
from cocodiff_compile.report.collect import GraphReport, is_collecting
from cocodiff_compile.report.dumps import FolderDump, TraceDump
from cocodiff_compile.report.graph_history import GraphHistory
from cocodiff_compile.report.rank_page import rank_page

_graph_numbers = itertools.count()


@dataclass(frozen=True)
class Dumps:
    """Writes one graph down while passes run."""

    number: int
    rank: int
    rank_folder: Path | None
    """The folder of this rank; None if nothing is written."""
    history: GraphHistory | None = None
    """What the graph looked like between passes; None if nobody wants a page."""
    kind: str = ""

    @classmethod
    def of(cls, config: CompileConfig, dry_run: bool) -> Dumps:
        number = next(_graph_numbers)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder = config.debug_dir and config.debug_dir / f"rank_{rank:03d}"
        is_wanted = folder is not None or (dry_run and is_collecting())
        return cls(number, rank, folder, GraphHistory() if is_wanted else None)

    def of_kind(self, kind: str) -> Dumps:
        """Returns the dumps for one kind of denoising step, in a folder inside of this one."""
        return replace(self, kind=kind, history=self.history and self.history.copy())

    @property
    def folder(self) -> Path | None:
        """Returns the folder of this graph."""
        if self.rank_folder is None:
            return None
        return self.rank_folder / f"graph_{self.number:03d}" / self.kind.replace(" ", "_")

    @functools.cached_property
    def dumps(self) -> tuple[FolderDump | TraceDump, ...]:
        if self.folder is None:
            return (TraceDump(),)
        return (TraceDump(), FolderDump(self.folder, self.rank, self.number))

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Returns all that watch the passes of this graph."""
        return self.dumps if self.history is None else (*self.dumps, self.history)

    def finish(self, found: GraphReport) -> None:
        """Writes what was found in the graph."""
        for dump in self.dumps:
            dump.finished(found.summary)
        if self.rank_folder is not None and found.page is not None:
            rank_page(self.rank_folder).add(found.page)

    def update_page(self, kind: str, **more: Any) -> None:
        """Adds what became known of the graph later to its page."""
        if self.rank_folder is not None:
            rank_page(self.rank_folder).update(self.number, kind, **more)

    def show_run(self, recorded: Mapping[str, Any]) -> None:
        """Adds what was recorded while the graph ran to its page."""
        if self.rank_folder is not None:
            rank_page(self.rank_folder).show_run(self.number, recorded)
