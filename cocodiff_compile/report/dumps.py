# SPDX-License-Identifier: Apache-2.0
"""Defines observers that record a pipeline, in a folder and in torch's structured trace."""

from __future__ import annotations

import difflib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from cocodiff_compile.compat import trace_artifact
from cocodiff_compile.decide.shard_report import ShardReport
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.report.describe import format_graph
from cocodiff_compile.report.describe_sharing import format_modules, format_sharing
from cocodiff_compile.report.draw_sharing import draw_sharing
from cocodiff_compile.report.dump_code import constants, op_counts, runnable_code
from cocodiff_compile.say_once import say_once

log = logging.getLogger(__name__)

_TITLE = "TITLE"


@dataclass
class FolderDump:
    """Writes one folder per rank and graph:

        00_captured.py          the graph as it came in; runs by itself
        NN_<pass>.py            the graph after each pass
        NN_<pass>.diff          what the pass changed; empty if nothing
        op_counts.txt           one line per stage
        explanation.txt, .json  sites, declines, passes
        sharing.txt, .svg       what shard-tokens shares out, module by module; if it was asked for

    A folder that is full or cannot be written is logged once, and this rank continues without
    dumps, since the other ranks would wait for it.
    """

    folder: Path
    rank: int
    graph_index: int
    _stage: int = 0
    _code: str = field(default="", repr=False)
    """The code of the last stage that changed the graph, with `_TITLE` in place of its title."""
    _is_writing: bool = True

    def captured(self, module: GraphModule) -> None:
        held = constants(module)

        def begin() -> None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            if held:
                torch.save(held, self.folder / "constants.pt")

        self._try(begin)
        self._code = runnable_code(module, _TITLE, self.rank)
        self._write_graph("captured", module)

    def after_pass(self, name: str, module: GraphModule, result: PassResult) -> None:
        self._stage += 1
        before = self._code
        if result.changed:
            self._code = runnable_code(module, _TITLE, self.rank)
        self._write_graph(name, module)
        self._write(f"{self._stage:02d}_{name}.diff", _code_diff(before, self._code, name))

    def finished(self, summary: dict[str, Any]) -> None:
        self._write("explanation.txt", format_graph(summary) + "\n")
        self._write("explanation.json", json.dumps(summary, indent=1) + "\n")
        if summary["sharing"]:
            sharing = ShardReport.from_data(summary["sharing"])
            tables = (format_sharing(sharing), format_modules(sharing))
            self._write("sharing.txt", "\n\n".join(tables) + "\n")
            self._write("sharing.svg", draw_sharing(sharing))

    def _write_graph(self, name: str, module: GraphModule) -> None:
        title = f"Graph {self.graph_index} of rank {self.rank}: {name}."
        self._write(f"{self._stage:02d}_{name}.py", self._code.replace(_TITLE, title, 1))
        counts = "  ".join(f"{op} {count}" for op, count in op_counts(module.graph).items())
        self._write("op_counts.txt", f"{self._stage:02d}_{name}: {counts}\n", mode="a")

    def _write(self, name: str, text: str, mode: str = "w") -> None:
        def write() -> None:
            with (self.folder / name).open(mode) as file:
                file.write(text)

        self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        if not self._is_writing:
            return
        try:
            write()
        except (OSError, RuntimeError) as error:  # RuntimeError: torch.save on a full disk
            self._is_writing = False
            say_once(log, logging.WARNING, f"debug_dir: dumps of this rank are incomplete: {error}")


@dataclass
class TraceDump:
    """Writes artifacts of the structured trace: `TORCH_TRACE=DIR`, then `tlparse DIR`."""

    _stage: int = 0
    _code: str = field(default="", repr=False)

    def captured(self, module: GraphModule) -> None:
        trace_artifact("cocodiff_00_captured", lambda: self._shown(module))

    def after_pass(self, name: str, module: GraphModule, result: PassResult) -> None:  # noqa: ARG002
        self._stage += 1
        before = self._code
        stage = f"cocodiff_{self._stage:02d}_{name}"
        trace_artifact(stage, lambda: self._shown(module))
        trace_artifact(f"{stage}.diff", lambda: _code_diff(before, self._code, name))

    def _shown(self, module: GraphModule) -> str:
        """Returns the readable code; called only if tracing is on, to format none in vain."""
        self._code = module.print_readable(print_output=False)
        return self._code

    def finished(self, summary: dict[str, Any]) -> None:
        trace_artifact("cocodiff_explanation", lambda: format_graph(summary))


def _code_diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        fromfile=f"before {name}",
        tofile=f"after {name}",
    )
    return "".join(lines)
