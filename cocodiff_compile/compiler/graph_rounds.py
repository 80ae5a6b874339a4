# SPDX-License-Identifier: Apache-2.0
"""Lets ranks agree on one graph, in rounds, if there are ranks to agree with."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph

from cocodiff_compile.compiler.compile_facts import captured_facts, collective_groups, planned_facts
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.decide.decision import Decision
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.ranks.agreement.checked_call import CheckedCall
from cocodiff_compile.ranks.agreement.compile_rounds import (
    CompileRounds,
    Groups,
    compile_rounds,
    facts_by_ranks,
)
from cocodiff_compile.ranks.agreement.failures import concerns_groups, mark_local_attempt
from cocodiff_compile.ranks.agreement.rank_state import Facts
from cocodiff_compile.ranks.agreement.run_plans import (
    SizedPlans,
    SizeTexts,
    expressions_of,
    symbol_positions,
)
from cocodiff_compile.ranks.agreement.world import ranks_are_real


@dataclass(frozen=True)
class GraphRounds:
    """Compares one graph between its ranks; without groups there is nobody to compare with."""

    groups: Groups
    captured: dict[str, Facts]
    sizes: SizeTexts
    places: dict[Any, int]
    """Where the inputs of the graph hold the value of each symbol."""
    rounds: CompileRounds | None
    """None if this rank compiles alone: its groups have agreed on the graph before."""

    def compare_planned(self, graph: Graph, recognition: Recognition, decision: Decision) -> None:
        """Compares what was decided, and what the passes left, before code is made of it."""
        if self.rounds is not None:
            sizes = SizeTexts()
            planned = planned_facts(graph, recognition, sizes)
            decided = [(f"the decision on {what}", value) for what, value in decision.lines]
            exchanging = {item.group for site in recognition.sites for item in site.exchanges}
            facts = {
                name: [*sizes.as_compiled(own), *(decided if name in exchanging else ())]
                for name, own in planned.items()
            }
            self.rounds.compare("planned", facts)

    def plans(self, graph: Graph, recognition: Recognition) -> SizedPlans | None:
        """Returns what calls of the graph communicate; None with nobody to compare it with."""
        if not self.groups:
            return None
        planned = planned_facts(graph, recognition, self.sizes)
        return SizedPlans(
            facts_by_ranks(self.groups, self.captured),
            facts_by_ranks(self.groups, planned),
            expressions_of(self.sizes, self.places),
            self.places if self.sizes.symbolic else {},
        )

    @property
    def within_a_call(self) -> GraphRounds:
        """Returns rounds for what is called from code whose calls are compared already."""
        return replace(self, groups={})


def checked(run: Any, plans: SizedPlans | None) -> Any:
    """Returns `run`, compared by the ranks when it is called."""
    return run if plans is None else CheckedCall(run, plans)


@contextmanager
def graph_rounds(
    graph: Graph,
    recognition: Recognition,
    config: CompileConfig,
    dry_run: bool,
    kind: str = "",
    given: Collection[str] = (),
) -> Iterator[GraphRounds]:
    """Yields the rounds with the other ranks; there are none without ranks, and in a dry run.
    `kind` tells apart what is made of one captured graph; `given` are the kinds of step for which
    an earlier decision is given: a rank that has another would not take part in measurements.
    """
    is_among_ranks = not dry_run and ranks_are_real()
    groups = collective_groups(graph) if is_among_ranks else {}
    if is_among_ranks:
        concerns_groups(list(groups.values()))
    if is_among_ranks and not groups:
        mark_local_attempt()
    sizes = SizeTexts()
    captured = {name: captured_facts(graph, recognition, name, config, sizes) for name in groups}
    if config.decision is not None and not kind:
        held = ("the steps for which a decision is given", ", ".join(sorted(given)) or "none")
        captured = {name: [held, *own] for name, own in captured.items()}
    if kind:
        captured = {name: [("the kind of step", kind), *own] for name, own in captured.items()}
    if not groups:
        yield GraphRounds(groups, captured, sizes, {}, None)
        return
    facts = {name: sizes.as_compiled(own) for name, own in captured.items()}
    with compile_rounds(groups, facts) as rounds:
        yield GraphRounds(groups, captured, sizes, symbol_positions(graph), rounds)
