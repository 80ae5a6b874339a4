"""Rounds in which the ranks of a group compare what they compile, through the store of the world.

    captured   versions, options and collectives, before any process group is made
    planned    the phases of every exchange, before code is generated
    compiled   code is there on every rank, before any rank runs it

A difference is the same error on every rank. A rank that fails says so, and the others raise with
its message; one that stops beating is dead. What a group has agreed on once is not asked again, so
that a rank may recompile alone: whether the ranks then run the same code is compared when they call
it (`call_rounds`). A rank that compiles something new while others run the code they have waits in
vain: these answer for what they run, and all raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from cocodiff_compile.errors import PeerError, UserError
from cocodiff_compile.ranks.agreement.failures import attempts_together, goes_alone, meet
from cocodiff_compile.ranks.agreement.standing import Facts, Ranks, group_key, standing
from cocodiff_compile.ranks.agreement.waiting import stay_until_read, store_reached, wait_for
from cocodiff_compile.ranks.agreement.world import PerWorld, world_store

Groups = Mapping[str, Ranks]
"""Name -> global ranks."""


@dataclass
class _Memory:
    """What this rank remembers of one world."""

    agreed: set[str] = field(default_factory=set)


_memory = PerWorld(_Memory)


@contextmanager
def compile_rounds(groups: Groups, captured: Mapping[str, Facts]) -> Iterator[CompileRounds | None]:
    """Compares what was captured, per group, then runs the block, then waits until the block is
    done on every rank. For ranks that are real.

    None, and no word to anyone, if the groups have agreed on the same before.
    """
    digest = hashlib.sha256(json.dumps([groups, captured]).encode()).hexdigest()
    if digest in _memory.get().agreed:
        goes_alone()
        yield None
        return
    rounds = CompileRounds(groups)
    rounds.compare("captured", captured)
    yield rounds
    rounds.compare("compiled", {})
    _memory.get().agreed.add(digest)


class CompileRounds:
    """The rounds of one graph, over all its groups at once."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._numbers = {ranks: standing.get().towards(ranks).rounds for ranks in groups.values()}

    def compare(self, stage: str, facts: Mapping[str, Facts]) -> None:
        """Waits for the facts of every rank of every group; raises on all if they differ."""
        store, rank = world_store(), dist.get_rank()
        with store_reached():
            for ranks, own in facts_by_ranks(self._groups, facts).items():
                number = self._numbers[ranks]
                store.set(round_key(ranks, number, stage, rank), record([*own, DOES_COMPILE]))
                store.set(asked_key(ranks, number, standing.get().towards(ranks).calls), "")
            for ranks, number in self._numbers.items():
                self._compare_group(ranks, number, stage)

    def _compare_group(self, ranks: Ranks, number: int, stage: str) -> None:
        store, rank = world_store(), dist.get_rank()
        keys = {other: round_key(ranks, number, stage, other) for other in ranks}
        try:
            wait_for(keys, stage)
        except UserError:
            # The round did not take place: the next attempt must not read this one's words.
            with suppress(dist.DistError):
                store.delete_key(keys[rank])
                store.delete_key(asked_key(ranks, number, standing.get().towards(ranks).calls))
            raise
        standing.get().towards(ranks).rounds = number + 1
        if difference := difference_of(keys):
            # Ranks of other groups of this graph wait too, and have not compared the same.
            raise PeerError(difference) if len(self._numbers) == 1 else UserError(difference)


DOES_COMPILE = ("what they do", "compiles a graph")
"""The last fact of a rank in a round of a compile."""


def facts_by_ranks(groups: Groups, facts: Mapping[str, Facts]) -> dict[Ranks, Facts]:
    """All that concerns the same ranks, whatever their groups are called."""
    found: dict[Ranks, Facts] = {}
    names: dict[Ranks, int] = {}
    for name, ranks in groups.items():
        number = names[ranks] = names.get(ranks, 0) + 1
        where = f" of group {number} of these ranks" if number > 1 else ""
        own = [(f"{what}{where}", value) for what, value in facts.get(name, [])]
        found.setdefault(ranks, []).extend(own)
    return found


def round_key(ranks: Ranks, number: int, stage: str, rank: int) -> str:
    return f"cocodiff/{group_key(ranks)}/{number}/{stage}/{rank}"


def asked_key(ranks: Ranks, number: int, calls: int) -> str:
    """Set while a rank that has begun so many calls over the group waits in a round."""
    return f"cocodiff/{group_key(ranks)}/{number}/asked after {calls}"


def record(facts: Facts) -> str:
    """What a rank puts into a round."""
    return json.dumps({"together": attempts_together(), "facts": facts})


def difference_of(keys: Mapping[int, str]) -> str:
    """The first difference between the facts that all ranks have set; empty if there is none.
    Waits for the others to read them if there is one, since this process may end then.
    """
    store = world_store()
    given = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    meet({rank: own["together"] for rank, own in given.items()})
    if difference := first_difference({rank: own["facts"] for rank, own in given.items()}):
        store.set(f"{keys[dist.get_rank()]}/read", "")
        stay_until_read([f"{key}/read" for key in keys.values()])
    return difference


def first_difference(facts: Mapping[int, Facts]) -> str:
    """The first fact on which a rank differs from the first rank, in words; empty if none does."""
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
