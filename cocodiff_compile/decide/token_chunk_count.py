# SPDX-License-Identifier: Apache-2.0
"""Decides whether tokens are cut into chunks, and from which attentions on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Graph

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.cost.tasks import Tasks
from cocodiff_compile.cut.cut import CutPlan
from cocodiff_compile.decide.choice import Choice
from cocodiff_compile.decide.limits import Limits, pays
from cocodiff_compile.ir.records import Declined, Recognition, UlyssesSite
from cocodiff_compile.ir.sketch import sketched
from cocodiff_compile.passes.chunk_tokens import chunk_tokens, plan_cuttable
from cocodiff_compile.schedule.graph_tasks import graph_tasks, step_seconds
from cocodiff_compile.schedule.list_schedule import list_schedule


@dataclass(frozen=True)
class TokenChunks:
    """`count` chunks from the attentions at these places on; 1 leaves all tokens whole."""

    count: int = 1
    attentions: tuple[int, ...] = ()


WHOLE = TokenChunks()

Differ = Callable[[CutPlan], str]
"""Says why a plan would not give the same bits on every rank; nothing if it would."""


def check_token_chunks(
    graph: Graph, recognition: Recognition, count: int, differ: Differ
) -> Choice[TokenChunks]:
    """Takes the `count` chunks that were asked for, if these give the same bits."""
    plan, declined = plan_cuttable(graph, recognition.sites, count)
    if reason := differ(plan):
        return Choice(WHOLE, (f"left whole: {reason}",), declined)
    return Choice(TokenChunks(count, _able(recognition.sites, declined)), (), declined)


def choose_token_chunks(
    graph: Graph, recognition: Recognition, costs: Costs, differ: Differ, limits: Limits
) -> Choice[TokenChunks]:
    """Takes chunks if they pay; an attention that cannot be cut then gets a note only."""
    count = limits.token_chunks
    plan, whole = plan_cuttable(graph, recognition.sites, count)
    notes = (f"{len(whole)} attentions left whole: {whole[0].reason}",) if whole else ()
    if reason := differ(plan):
        return Choice(WHOLE, (*notes, f"left whole: {reason}"))
    if not plan.steps:
        return Choice(WHOLE, notes)
    whole_s = step_seconds(graph, recognition, costs)
    cut_s = list_schedule(token_chunk_tasks(graph, recognition, costs, count)).clock.now_s
    note = f"estimated {whole_s * 1e3:.1f} ms whole, {cut_s * 1e3:.1f} ms in {count} token chunks"
    if not pays(whole_s, cut_s, limits.token_chunk_gain):
        return Choice(WHOLE, (*notes, f"{note}: left whole"))
    return Choice(TokenChunks(count, _able(recognition.sites, whole)), (*notes, note))


def _able(sites: Sequence[UlyssesSite], declined: Sequence[Declined]) -> tuple[int, ...]:
    left_whole = {item.node for item in declined}
    return tuple(
        place for place, site in enumerate(sites) if site.attention.output not in left_whole
    )


def token_chunk_tasks(graph: Graph, recognition: Recognition, costs: Costs, count: int) -> Tasks:
    """Returns the tasks of a graph as they would be with tokens in `count` chunks."""
    if count > 1:
        graph, recognition = sketched(graph, recognition)
        plan, _ = plan_cuttable(graph, recognition.sites, count)
        recognition = chunk_tokens(graph, recognition, plan).recognition or recognition
    return graph_tasks(graph, recognition, costs).tasks
