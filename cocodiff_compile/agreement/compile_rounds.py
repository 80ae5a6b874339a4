"""Rounds in which the ranks of a group compare what they compile, through the store of the world.

    captured   versions, options and collectives, before any process group is made
    planned    the phases of every exchange, before code is generated
    compiled   code is there on every rank, before any rank runs it

A difference is the same error on every rank. A rank that fails says so, and the others raise with
its message; one that stops beating is dead. What a group has agreed on once is not asked again, so
that a rank may recompile alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from cocodiff_compile.agreement.compile_facts import Facts
from cocodiff_compile.agreement.heartbeat import beating
from cocodiff_compile.agreement.waiting import stay_until_read, store_reached, wait_for
from cocodiff_compile.agreement.world import PerWorld
from cocodiff_compile.compat import default_store
from cocodiff_compile.errors import PeerError, UserError

Groups = Mapping[str, tuple[int, ...]]
"""Name -> global ranks."""


@dataclass
class _Memory:
    """What this rank remembers of one world."""

    rounds: dict[tuple[int, ...], int] = field(default_factory=dict)
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
        yield None
        return
    with beating(default_store(), dist.get_rank()):
        rounds = CompileRounds(groups)
        rounds.compare("captured", captured)
        yield rounds
        rounds.compare("compiled", {})
    _memory.get().agreed.add(digest)


class CompileRounds:
    """The rounds of one graph, over all its groups at once."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._numbers = {name: _memory.get().rounds.get(ranks, 0) for name, ranks in groups.items()}

    def compare(self, stage: str, facts: Mapping[str, Facts]) -> None:
        """Waits for the facts of every rank of every group; raises on all if they differ."""
        with store_reached():
            for name in self._groups:
                mine = json.dumps(facts.get(name, []))
                default_store().set(self._key(name, stage, dist.get_rank()), mine)
            for name in self._groups:
                self._compare_group(name, stage)

    def _compare_group(self, name: str, stage: str) -> None:
        ranks = self._groups[name]
        keys = {rank: self._key(name, stage, rank) for rank in ranks}
        self._wait(name, stage, keys)
        _memory.get().rounds[ranks] = self._numbers[name] + 1
        given = {rank: json.loads(default_store().get(key)) for rank, key in keys.items()}
        if difference := first_difference(given):
            default_store().set(f"{keys[dist.get_rank()]}/read", "")
            stay_until_read([f"{key}/read" for key in keys.values()])
            raise PeerError(difference)

    def _wait(self, name: str, stage: str, keys: Mapping[int, str]) -> None:
        try:
            wait_for(keys, stage)
        except UserError:
            # The round did not take place: the next attempt must not read this one's words.
            with suppress(dist.DistError):
                default_store().delete_key(self._key(name, stage, dist.get_rank()))
            raise

    def _key(self, name: str, stage: str, rank: int) -> str:
        members = hashlib.sha256(repr(self._groups[name]).encode()).hexdigest()[:16]
        return f"cocodiff/{members}/{self._numbers[name]}/{stage}/{rank}"


def first_difference(facts: Mapping[int, Facts]) -> str:
    """The first fact on which a rank differs from the first rank, in words; empty if none does."""
    first, *others = facts
    ours = dict(facts[first])
    for rank in others:
        theirs = dict(facts[rank])
        for what in [*ours, *(what for what in theirs if what not in ours)]:
            if ours.get(what) != theirs.get(what):
                return (
                    f"ranks disagree about {what}: rank {first} has {ours.get(what, 'none')}, rank "
                    f"{rank} has {theirs.get(what, 'none')}; start all ranks with the same model, "
                    "shapes, options and versions"
                )
    return ""
