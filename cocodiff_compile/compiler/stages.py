"""The stages that a graph goes through, in order, and what each of them chooses.

    recognize   recognize-ulysses
    cut         split-projections, chunk-heads, chunk-tokens
    select      select-v-major, once per kind of denoising step
    order       split-tapa-phases, schedule-v-first, once per kind of denoising step

To add a pass, write it in `passes/`, what it is to be decided by in `decide/`, and add a stage here
and its name to `PASS_NAMES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch.fx import Graph

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.coded_attentions import choose_uncoded
from cocodiff_compile.decide.coding_worth import CodingWorth
from cocodiff_compile.decide.decision import ExchangePhases
from cocodiff_compile.decide.head_chunk_count import choose_head_chunks
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.decide.order import choose_order
from cocodiff_compile.decide.phases import choose_phases
from cocodiff_compile.decide.token_chunk_count import (
    Differ,
    check_token_chunks,
    choose_token_chunks,
)
from cocodiff_compile.decide.unfused_projections import choose_unfused
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.chunk_tokens import ChunkTokens
from cocodiff_compile.passes.recognize_ulysses import RecognizeUlysses
from cocodiff_compile.passes.schedule_v_first import ScheduleVFirst
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.passes.split_projections import SplitProjections
from cocodiff_compile.passes.split_tapa_phases import SplitTapaPhases
from cocodiff_compile.pipeline.run_passes import Chosen, Stage
from cocodiff_compile.topology.machine import Machine


@dataclass(frozen=True)
class Deciding:
    """What the stages of one graph decide by."""

    config: CompileConfig
    costs: Costs | None = None
    """What ops and exchanges cost, the same on every rank; None where nothing can overlap."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """The machine under each Ulysses group, by the group's name."""
    differ: Differ = lambda _plan: ""
    select: SelectVMajor | None = None
    """The pass that exchanges less in some steps, for one kind of step."""
    worth: CodingWorth | None = None
    budget_bytes: float | None = None
    keeps_whole: bool = False
    """Attentions stay in one piece: which tokens are skipped is decided for all of them at once."""
    limits: Limits = field(default_factory=Limits)


Choose: TypeAlias = "Callable[[Deciding, Graph, Recognition], Chosen | None]"


def _recognize(_deciding: Deciding, _graph: Graph, _found: Recognition) -> Chosen:
    return Chosen(RecognizeUlysses())


def _unfuse(deciding: Deciding, graph: Graph, found: Recognition) -> Chosen | None:
    if deciding.costs is None:
        return None
    choice = choose_unfused(graph, found, deciding.costs, deciding.limits)
    return Chosen(
        SplitProjections() if choice.value else None,
        choice.notes,
        decided={"unfused_projections": choice.value},
    )


def _chunk_heads(deciding: Deciding, graph: Graph, found: Recognition) -> Chosen | None:
    asked = 1 if deciding.keeps_whole else deciding.config.head_chunks
    if asked == 1 or (asked == "auto" and deciding.costs is None):
        return None
    counts = (1,) * len(found.sites)
    if asked != "auto":
        counts = (asked,) * len(found.sites)
    elif deciding.costs is not None:
        chosen = choose_head_chunks(
            graph, found, deciding.costs, _token_counts(deciding), deciding.limits
        )
        counts = tuple(chosen.get(place, 1) for place in range(len(found.sites)))
    return Chosen(ChunkHeads(counts), decided={"head_chunks": counts})


def _token_counts(deciding: Deciding) -> tuple[int, ...]:
    """The numbers of token chunks that are possible behind the head chunks."""
    asked = _asked_token_chunks(deciding)
    if asked != "auto":
        return (asked,)
    return (1, deciding.limits.token_chunks) if deciding.costs is not None else (1,)


def _asked_token_chunks(deciding: Deciding) -> int | Literal["auto"]:
    is_off = deciding.keeps_whole or "chunk-tokens" in deciding.config.disable
    return 1 if is_off else deciding.config.token_chunks


def _chunk_tokens(deciding: Deciding, graph: Graph, found: Recognition) -> Chosen | None:
    asked, costs = _asked_token_chunks(deciding), deciding.costs
    if asked == 1 or (asked == "auto" and costs is None):
        return None
    if isinstance(asked, int):
        choice = check_token_chunks(graph, found, asked, deciding.differ)
    else:
        assert costs is not None
        choice = choose_token_chunks(graph, found, costs, deciding.differ, deciding.limits)
    count, attentions = choice.value.count, choice.value.attentions
    return Chosen(
        ChunkTokens(count, attentions) if count > 1 else None,
        choice.notes,
        choice.declined,
        decided={"token_chunks": count, "token_chunked": attentions},
    )


def _select(deciding: Deciding, _graph: Graph, found: Recognition) -> Chosen | None:
    if deciding.select is None:
        return None
    uncoded = choose_uncoded(deciding.select, found, deciding.budget_bytes, deciding.worth)
    return Chosen(replace(deciding.select, uncoded=uncoded), decided={"uncoded": uncoded})


def _split_phases(deciding: Deciding, _graph: Graph, found: Recognition) -> Chosen | None:
    if deciding.config.tapa_mode == "off" or not deciding.machines:
        return None
    phases = choose_phases(found, deciding.machines, deciding.config.tapa_mode)
    places = {group: place for place, group in enumerate(dict.fromkeys(key[0] for key in phases))}
    kept = tuple(
        ExchangePhases(places[group], size_bytes, item)
        for (group, size_bytes), item in phases.items()
    )
    return Chosen(SplitTapaPhases(deciding.machines, phases), decided={"phases": kept})


def _schedule(deciding: Deciding, graph: Graph, found: Recognition) -> Chosen | None:
    if deciding.costs is None or not found.sites:
        return None
    choice = choose_order(graph, found, deciding.costs, deciding.limits)
    return Chosen(
        ScheduleVFirst(choice.order) if choice.order is not None else None,
        (choice.note,),
        estimate=choice.estimate,
        decided={"order": choice.order},
    )


RECOGNIZE: tuple[tuple[str, Choose], ...] = (("recognize-ulysses", _recognize),)
CUT: tuple[tuple[str, Choose], ...] = (
    ("split-projections", _unfuse),
    ("chunk-heads", _chunk_heads),
    ("chunk-tokens", _chunk_tokens),
)
SELECT: tuple[tuple[str, Choose], ...] = (("select-v-major", _select),)
ORDER: tuple[tuple[str, Choose], ...] = (
    ("split-tapa-phases", _split_phases),
    ("schedule-v-first", _schedule),
)
STAGES = (*RECOGNIZE, *CUT, *SELECT, *ORDER)


def stages(part: tuple[tuple[str, Choose], ...], deciding: Deciding) -> tuple[Stage, ...]:
    """The stages of one part of the table that are not disabled."""
    return tuple(
        Stage(name, functools.partial(choose, deciding))
        for name, choose in part
        if name not in deciding.config.disable
    )
