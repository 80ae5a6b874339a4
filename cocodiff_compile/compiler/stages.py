# SPDX-License-Identifier: Apache-2.0
"""Lists the stages that a graph goes through, in order, and what each of them chooses.

    shard       shard-tokens, if it is asked for
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
from cocodiff_compile.decide.choice import Choice
from cocodiff_compile.decide.coded_attentions import choose_uncoded
from cocodiff_compile.decide.coding_worth import CodingWorth
from cocodiff_compile.decide.decision import Decision, ExchangePhases
from cocodiff_compile.decide.head_chunk_count import choose_head_chunks
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.decide.order import choose_order
from cocodiff_compile.decide.phases import choose_phases
from cocodiff_compile.decide.report_sharing import report_sharing
from cocodiff_compile.decide.shared_nodes import (
    ShareCosts,
    Sharing,
    choose_sharing,
    why_not_shared,
)
from cocodiff_compile.decide.token_chunk_count import (
    Differ,
    TokenChunks,
    check_token_chunks,
    choose_token_chunks,
)
from cocodiff_compile.decide.unfused_projections import choose_unfused
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.chunk_tokens import ChunkTokens
from cocodiff_compile.passes.recognize_ulysses import RecognizeUlysses
from cocodiff_compile.passes.schedule_v_first import ScheduleVFirst
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.passes.shard_tokens import ShardTokens
from cocodiff_compile.passes.split_projections import SplitProjections
from cocodiff_compile.passes.split_tapa_phases import SplitTapaPhases
from cocodiff_compile.pipeline.run_passes import Chosen, Stage
from cocodiff_compile.shard.any_size import is_for_any_size, prepare_for_shares
from cocodiff_compile.topology.machine import Machine


@dataclass(frozen=True)
class Sharding:
    """Says with whom tokens are shared out, and what that costs."""

    group: str
    num_ranks: int
    costs: ShareCosts
    """What is decided by: exchanges cost nothing where all that can be is to be shared out."""
    estimated: ShareCosts
    """What is reported, exchanges included."""
    keeps_shares: bool
    """Whether outputs stay shares, for another block that is compiled alike."""
    chosen: Sharing | None = None
    """What is shared out, where that was chosen before."""


@dataclass(frozen=True)
class Deciding:
    """Holds everything that the stages of one graph decide by."""

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
    sharding: Sharding | None = None
    given: Decision | None = None
    """What is not to be decided again, from an earlier compile of the same graph."""


Choose: TypeAlias = "Callable[[Deciding, Graph, Recognition], Chosen | None]"


def _shard(deciding: Deciding, graph: Graph, _recognition: Recognition) -> Chosen | None:
    if deciding.config.shard is None:
        return None
    sharding = deciding.sharding
    if sharding is None:
        return Chosen(notes=("not shared out: there is one rank",))
    if reason := why_not_shared(graph):
        return Chosen(notes=(f"not shared out: {reason}",))
    num_ranks, keeps_shares = sharding.num_ranks, sharding.keeps_shares
    sharing = sharding.chosen or choose_sharing(
        graph, sharding.group, num_ranks, sharding.costs, keeps_shares
    )
    least = deciding.config.shard.min_gain
    is_applied = bool(sharing.steps) and sharing.gain >= least
    report = report_sharing(graph, sharing, num_ranks, sharding.estimated, keeps_shares, is_applied)
    if not is_applied:
        note = f"not shared out: estimated gain {sharing.gain:.2f}x, less than min_gain {least:g}"
        return Chosen(notes=(note,), sharing=report)
    shard = ShardTokens(sharing.steps, sharding.group, keeps_shares)
    return Chosen(shard, (f"shared out over {num_ranks} ranks",), sharing=report)


def deciding_for_any_size(graph: Graph, deciding: Deciding) -> Deciding | None:
    """Returns what a graph with symbolic sizes is decided by. None if it had better be compiled for
    each set of sizes: its tokens can be shared out, but not in all attentions while sizes are
    symbols.
    """
    sharding = deciding.sharding
    if sharding is None or not is_for_any_size(graph) or why_not_shared(graph):
        return deciding
    if not prepare_for_shares(graph, sharding.num_ranks):
        return None
    chosen = choose_sharing(
        graph, sharding.group, sharding.num_ranks, sharding.costs, sharding.keeps_shares
    )
    if any(is_attention(node.target) and node not in chosen.steps for node in graph.nodes):
        return None
    return replace(deciding, sharding=replace(sharding, chosen=chosen))


def _recognize(_deciding: Deciding, _graph: Graph, _recognition: Recognition) -> Chosen:
    return Chosen(RecognizeUlysses())


def _unfuse(deciding: Deciding, graph: Graph, recognition: Recognition) -> Chosen | None:
    if deciding.given is not None:
        choice = Choice(deciding.given.unfused_projections)
    elif deciding.costs is None:
        return None
    else:
        choice = choose_unfused(graph, recognition, deciding.costs, deciding.limits)
    return Chosen(
        SplitProjections() if choice.value else None,
        choice.notes,
        decided={"unfused_projections": choice.value},
    )


def _chunk_heads(deciding: Deciding, graph: Graph, recognition: Recognition) -> Chosen | None:
    counts = _head_counts(deciding, graph, recognition)
    if counts is None:
        return None
    return Chosen(ChunkHeads(counts), decided={"head_chunks": counts})


def _head_counts(
    deciding: Deciding, graph: Graph, recognition: Recognition
) -> tuple[int, ...] | None:
    """Returns the number of head chunks of each attention; None where heads are not to be cut."""
    if deciding.given is not None:
        return deciding.given.head_chunks or None
    asked = 1 if deciding.keeps_whole else deciding.config.head_chunks
    if asked == "auto" and deciding.costs is not None:
        token_counts = _token_counts(deciding)
        chosen = choose_head_chunks(
            graph, recognition, deciding.costs, token_counts, deciding.limits
        )
        return tuple(chosen.get(place, 1) for place in range(len(recognition.sites)))
    return None if asked in (1, "auto") else (int(asked),) * len(recognition.sites)


def _token_counts(deciding: Deciding) -> tuple[int, ...]:
    """Returns the numbers of token chunks that are possible behind the head chunks."""
    asked = _asked_token_chunks(deciding)
    if asked != "auto":
        return (asked,)
    return (1, deciding.limits.token_chunks) if deciding.costs is not None else (1,)


def _asked_token_chunks(deciding: Deciding) -> int | Literal["auto"]:
    is_off = deciding.keeps_whole or "chunk-tokens" in deciding.config.disable
    return 1 if is_off else deciding.config.token_chunks


def _chunk_tokens(deciding: Deciding, graph: Graph, recognition: Recognition) -> Chosen | None:
    choice = _token_chunks(deciding, graph, recognition)
    if choice is None:
        return None
    count, attentions = choice.value.count, choice.value.attentions
    return Chosen(
        ChunkTokens(count, attentions) if count > 1 else None,
        choice.notes,
        choice.declined,
        decided={"token_chunks": count, "token_chunked": attentions},
    )


def _token_chunks(
    deciding: Deciding, graph: Graph, recognition: Recognition
) -> Choice[TokenChunks] | None:
    asked, costs, given = _asked_token_chunks(deciding), deciding.costs, deciding.given
    if given is not None:
        return Choice(TokenChunks(given.token_chunks, given.token_chunked))
    if asked == "auto" and costs is not None:
        return choose_token_chunks(graph, recognition, costs, deciding.differ, deciding.limits)
    if asked in (1, "auto"):
        return None
    return check_token_chunks(graph, recognition, int(asked), deciding.differ)


def _select(deciding: Deciding, _graph: Graph, recognition: Recognition) -> Chosen | None:
    if deciding.select is None:
        return None
    if deciding.given is not None:
        uncoded = deciding.given.uncoded
    else:
        uncoded = choose_uncoded(
            deciding.select, recognition, deciding.budget_bytes, deciding.worth
        )
    return Chosen(replace(deciding.select, uncoded=uncoded), decided={"uncoded": uncoded})


def _split_phases(deciding: Deciding, _graph: Graph, recognition: Recognition) -> Chosen | None:
    given, groups = deciding.given, list(deciding.machines)
    if given is not None and not given.is_phased:
        return Chosen(decided={"phases": given.phases, "topologies": given.topologies})
    if deciding.config.tapa_mode == "off" or not deciding.machines:
        return None
    if given is not None:
        phases = {(groups[item.group], item.size_bytes): item.phases for item in given.phases}
    else:
        phases = choose_phases(recognition, deciding.machines, deciding.config.tapa_mode)
    kept = tuple(
        ExchangePhases(groups.index(group), size_bytes, item)
        for (group, size_bytes), item in phases.items()
    )
    topologies = tuple(machine.topology for machine in deciding.machines.values())
    return Chosen(
        SplitTapaPhases(deciding.machines, phases),
        decided={"phases": kept, "topologies": topologies},
    )


def _schedule(deciding: Deciding, graph: Graph, recognition: Recognition) -> Chosen | None:
    if deciding.given is not None:
        order = deciding.given.order
        return Chosen(ScheduleVFirst(order), decided={"order": order}) if order else None
    if deciding.costs is None or not recognition.sites:
        return None
    choice = choose_order(graph, recognition, deciding.costs, deciding.limits)
    return Chosen(
        ScheduleVFirst(choice.order) if choice.order is not None else None,
        (choice.note,),
        estimate=choice.estimate,
        decided={"order": choice.order},
    )


SHARD: tuple[tuple[str, Choose], ...] = (("shard-tokens", _shard),)
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
STAGES = (*SHARD, *RECOGNIZE, *CUT, *SELECT, *ORDER)


def stages(part: tuple[tuple[str, Choose], ...], deciding: Deciding) -> tuple[Stage, ...]:
    """Returns the stages of one part of the table that are not disabled."""
    return tuple(
        Stage(name, functools.partial(choose, deciding))
        for name, choose in part
        if name not in deciding.config.disable
    )
