# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a group compare what they compile, through the store of the world.

    captured   versions, options and collectives, before any process group is made
    planned    the phases of every exchange, before code is generated
    compiled   code exists on every rank, before any rank runs it

A difference is the same error on every rank. A rank that fails reports it, and the others raise
with its message; a rank whose heartbeat stops is dead. A group does not compare the same graph
twice, so that a rank may recompile alone: whether ranks then run the same code is compared when
they call it (`call_rounds`). If a rank compiles something new while others run the code they have,
these answer for what they run, and all raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist

from cocodiff_compile.errors import PeerError, UserError
from cocodiff_compile.ranks.agreement.failures import (
    joint_attempts,
    mark_local_attempt,
    record_peers,
)
from cocodiff_compile.ranks.agreement.rank_state import Facts, Ranks, group_key, rank_state
from cocodiff_compile.ranks.agreement.waiting import (
    explain_store_errors,
    linger_until_read,
    wait_for,
)
from cocodiff_compile.ranks.agreement.world import PerWorld, world_store

Groups = Mapping[str, Ranks]
"""Maps the name of a group to its global ranks."""


_agreed: PerWorld[set[str]] = PerWorld(set)
"""The digests of what the groups of this world have agreed on."""


@contextmanager
def compile_rounds(groups: Groups, captured: Mapping[str, Facts]) -> Iterator[CompileRounds | None]:
    """Compares what was captured, per group, runs the block, and then waits until the block is done
    on every rank. The ranks must be real.

    Yields None, and publishes nothing, if the groups have agreed on the same before.
    """
    digest = hashlib.sha256(json.dumps([groups, captured]).encode()).hexdigest()
    if digest in _agreed.get():
        mark_local_attempt()
        yield None
        return
    rounds = CompileRounds(groups)
    rounds.compare("captured", captured)
    yield rounds
    rounds.compare("compiled", {})
    _agreed.get().add(digest)


class CompileRounds:
    """Runs the rounds of one graph over all its groups at once."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._numbers = {ranks: rank_state.get().group(ranks).rounds for ranks in groups.values()}

    def compare(self, stage: str, facts: Mapping[str, Facts]) -> None:
        """Waits for the facts of every rank of every group; raises on all ranks if they differ."""
        store, rank = world_store(), dist.get_rank()
        with explain_store_errors():
            for ranks, own in facts_by_ranks(self._groups, facts).items():
                number = self._numbers[ranks]
                store.set(round_key(ranks, number, stage, rank), record([*own, DOES_COMPILE]))
                store.set(asked_key(ranks, number, rank_state.get().group(ranks).calls), "")
            for ranks, number in self._numbers.items():
                self._compare_group(ranks, number, stage)

    def _compare_group(self, ranks: Ranks, number: int, stage: str) -> None:
        store, rank = world_store(), dist.get_rank()
        keys = {other: round_key(ranks, number, stage, other) for other in ranks}
        try:
            wait_for(keys, stage)
        except UserError:
            # The round did not take place: the next attempt must not read this one's facts.
            with suppress(dist.DistError):
                store.delete_key(keys[rank])
                store.delete_key(asked_key(ranks, number, rank_state.get().group(ranks).calls))
            raise
        rank_state.get().group(ranks).rounds = number + 1
        if difference := difference_of(keys):
            # Ranks of other groups of this graph wait too, and have not compared the same.
            raise PeerError(difference) if len(self._numbers) == 1 else UserError(difference)


DOES_COMPILE = ("what they do", "compiles a graph")
"""The last fact of a rank in a round of a compilation."""


def facts_by_ranks(groups: Groups, facts: Mapping[str, Facts]) -> dict[Ranks, Facts]:
    """Returns all facts that concern the same ranks, whatever the names of their groups."""
    by_ranks: dict[Ranks, Facts] = {}
    names: dict[Ranks, int] = {}
    for name, ranks in groups.items():
        number = names[ranks] = names.get(ranks, 0) + 1
        where = f" of group {number} of these ranks" if number > 1 else ""
        own = [(f"{what}{where}", value) for what, value in facts.get(name, [])]
        by_ranks.setdefault(ranks, []).extend(own)
    return by_ranks


def round_key(ranks: Ranks, number: int, stage: str, rank: int) -> str:
    return f"cocodiff/{group_key(ranks)}/{number}/{stage}/{rank}"


def asked_key(ranks: Ranks, number: int, calls: int) -> str:
    """Returns the key that is set while a rank waits in a round after `calls` calls."""
    return f"cocodiff/{group_key(ranks)}/{number}/asked after {calls}"


def record(facts: Facts) -> str:
    """Returns what a rank writes to the store in a round."""
    return json.dumps({"joint": joint_attempts(), "facts": facts})


def difference_of(keys: Mapping[int, str]) -> str:
    """Returns the first difference between the facts that all ranks have set; an empty string if
    there is none. If there is one, it waits until the others have read them, since this process may
    end then.
    """
    store = world_store()
    given = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    record_peers({rank: own["joint"] for rank, own in given.items()})
    if difference := first_difference({rank: own["facts"] for rank, own in given.items()}):
        store.set(f"{keys[dist.get_rank()]}/read", "")
        linger_until_read([f"{key}/read" for key in keys.values()])
    return difference


def first_difference(facts: Mapping[int, Facts]) -> str:
    """Returns the first fact that differs from the first rank's, as a sentence; empty if none."""
    first, *others = facts
    ours: dict[str, str] = dict(facts[first])
    for rank in others:
        theirs: dict[str, str] = dict(facts[rank])
        for what in [*ours, *(what for what in theirs if what not in ours)]:
            if ours.get(what) != theirs.get(what):
                return (
                    f"ranks disagree about {what}: rank {first} has {ours.get(what, 'none')}, rank "
                    f"{rank} has {theirs.get(what, 'none')}; start all ranks with the same model, "
                    "shapes, options and versions"
                )
    return ""
