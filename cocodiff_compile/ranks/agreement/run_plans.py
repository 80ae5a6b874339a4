# SPDX-License-Identifier: Apache-2.0
"""Describes what a graph communicates, with the sizes of each call.

A rank whose graph has symbolic sizes and a rank whose graph has constant sizes run the same if the
sizes of the call are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.ranks.agreement.rank_state import Facts, Ranks, RunPlan

_SIZE = re.compile(r"<size (\d+)>")


@dataclass
class SizeTexts:
    """Formats sizes as text: a constant as its digits, a symbolic size as a mark for it."""

    symbolic: list[torch.SymInt] = field(default_factory=list)

    def text(self, size: int | torch.SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        self.symbolic.append(size)
        return f"<size {len(self.symbolic) - 1}>"

    def as_compiled(self, facts: Facts) -> Facts:
        """Returns `facts` with the sizes of the call that is compiled."""
        return with_sizes(facts, [optimization_hint(size) for size in self.symbolic])


def with_sizes(facts: Sequence[tuple[str, str]], sizes: Sequence[int]) -> Facts:
    """Returns `facts` with numbers in place of the marks."""
    if not sizes:
        return list(facts)
    return [
        (what, _SIZE.sub(lambda mark: str(sizes[int(mark[1])]), value)) for what, value in facts
    ]


@dataclass(eq=False)
class SizedPlans:
    """Holds the plan of each group, by the sizes of a call."""

    captured: Mapping[Ranks, Facts]
    planned: Mapping[Ranks, Facts]
    expressions: Sequence[Any]
    """The sizes that the marks in the facts stand for: sympy expressions, or numbers."""
    positions: Mapping[Any, int]
    """The index of the graph input that holds the value of each symbol."""
    _plans: dict[tuple[int, ...], dict[Ranks, RunPlan]] = field(default_factory=dict)

    def of_call(self, args: Sequence[Any]) -> Mapping[Ranks, RunPlan]:
        """Returns the plans for a call with these inputs."""
        values = tuple(int(args[position]) for position in self.positions.values())
        if values not in self._plans:
            self._plans[values] = self._evaluated(dict(zip(self.positions, values, strict=True)))
        return self._plans[values]

    def _evaluated(self, values: Mapping[Any, int]) -> dict[Ranks, RunPlan]:
        sizes = [
            item if isinstance(item, int) else int(item.subs(values)) for item in self.expressions
        ]
        return {
            ranks: RunPlan(
                tuple(with_sizes(own, sizes)), tuple(with_sizes(self.planned.get(ranks, []), sizes))
            )
            for ranks, own in self.captured.items()
        }


def symbol_positions(graph: Graph) -> dict[Any, int]:
    """Returns, by symbol, the index of the graph input that holds its value."""
    positions: dict[Any, int] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            positions.setdefault(value.node.expr, position)
    return positions


def expressions_of(sizes: SizeTexts, positions: Mapping[Any, int]) -> list[Any]:
    """Returns an expression for each size, or its value if no inputs hold all its symbols."""
    return [
        size.node.expr if size.node.expr.free_symbols <= {*positions} else optimization_hint(size)
        for size in sizes.symbolic
    ]
