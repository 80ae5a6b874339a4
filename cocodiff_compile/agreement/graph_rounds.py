"""The rounds in which ranks agree on one graph, if there are ranks to agree with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.fx import Graph

from cocodiff_compile.agreement.compile_facts import captured_facts, collective_groups
from cocodiff_compile.agreement.compile_rounds import CompileRounds, compile_rounds
from cocodiff_compile.agreement.world import ranks_are_real
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.graph.records import Recognition


def graph_rounds(
    graph: Graph, found: Recognition, config: CompileConfig, live: bool, kind: str = ""
) -> AbstractContextManager[CompileRounds | None]:
    """The rounds with the other ranks; none without any, and for a rank that only looks. `kind`
    tells apart what is made of one captured graph.
    """
    groups = collective_groups(graph) if live and ranks_are_real() else {}
    if not groups:
        return nullcontext()
    facts = {name: captured_facts(graph, found, name, config) for name in groups}
    if kind:
        facts = {name: [("the kind of step", kind), *own] for name, own in facts.items()}
    return compile_rounds(groups, facts)
