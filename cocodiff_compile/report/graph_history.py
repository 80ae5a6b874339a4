# SPDX-License-Identifier: Apache-2.0
"""Remembers a graph as text while passes run, for pages that show what each of them changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.report.graph_text import lines_of, packed, stages_data, unpacked


@dataclass
class GraphHistory:
    """Keeps the graph as it came, and after each pass that changed it."""

    stages: list[tuple[str, bytes]] = field(default_factory=list)
    step: dict[str, Any] | None = None
    """The estimated step as captured, of `page_data.describe_captured`."""

    def captured(self, module: GraphModule) -> None:
        if not self.stages:  # else a copy of what the last stage left, for a kind of step
            self.stages.append(("captured", packed(lines_of(module.graph))))

    def after_pass(self, name: str, module: GraphModule, result: PassResult) -> None:
        if result.changed:
            self.stages.append((name, packed(lines_of(module.graph))))

    def copy(self) -> GraphHistory:
        """Returns a history that goes on from here by itself."""
        return GraphHistory(list(self.stages), self.step)

    def to_data(self) -> dict[str, Any]:
        """Returns all stages, each compared with the one before, as plain data."""
        return stages_data([(name, unpacked(text)) for name, text in self.stages])
