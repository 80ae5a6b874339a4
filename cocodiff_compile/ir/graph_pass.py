# SPDX-License-Identifier: Apache-2.0
"""Defines what a pass is, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.fx import Graph

from cocodiff_compile.ir.records import Declined, Recognition


@dataclass(frozen=True)
class PassResult:
    """Says what one pass did. `changed` is false exactly if the graph is the same to the letter."""

    changed: bool
    recognition: Recognition | None = None
    declined: tuple[Declined, ...] = ()
    notes: tuple[str, ...] = ()


class GraphPass(Protocol):
    """A value: its fields are its options, it keeps no state, it touches nothing but the graph."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:
        """Works on `graph`; `recognition` is what the last recognition before this pass found."""
        ...
