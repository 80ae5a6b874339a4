"""Where this rank stands towards the other ranks of each group: rounds and calls that it has taken
part in, what it runs, and why its groups were closed.

The ranks of a group count the calls of compiled code that communicates over it. As long as they run
the same code, the n-th call of one rank meets the n-th call of every other rank.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from cocodiff_compile.ranks.agreement.world import PerWorld

Facts: TypeAlias = "list[tuple[str, str]]"
"""What ranks compare, as (what, value) pairs."""

Ranks: TypeAlias = "tuple[int, ...]"
"""The global ranks of a group."""


@dataclass(frozen=True)
class RunPlan:
    """What a call communicates over one group, with the sizes of the call."""

    captured: tuple[tuple[str, str], ...]
    """Versions, options, and the collectives as captured: compared before code is generated."""
    planned: tuple[tuple[str, str], ...]
    """The exchanges and collectives that the passes left."""

    @property
    def facts(self) -> Facts:
        return [*self.captured, *self.planned]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.facts).encode()).hexdigest()


@dataclass
class GroupStanding:
    """Towards the ranks of one group."""

    rounds: int = 0
    """Rounds of compiles that took place."""
    calls: int = 0
    """Calls that began."""
    plan: RunPlan | None = None
    """That of the last call; None if the next call must be compared whatever it runs."""
    running_since: float | None = None
    """When the code of the last call began to run; None while none runs."""
    last_compared: int | None = None
    """The last call before which the ranks compared plans."""
    closed: str = ""
    """Why this rank closed its groups of these ranks; empty while they are open."""


@dataclass
class Standing:
    """Towards all ranks of one world."""

    groups: dict[Ranks, GroupStanding] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    """Digests of plans whose facts this rank has put into the store."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever reads failures or answers other ranks: the main thread or the watch."""

    def towards(self, ranks: Ranks) -> GroupStanding:
        return self.groups.setdefault(ranks, GroupStanding())

    @property
    def calls(self) -> Mapping[str, int]:
        """Calls that began, by the key of the group."""
        return {group_key(ranks): group.calls for ranks, group in list(self.groups.items())}


def group_key(ranks: Ranks) -> str:
    """A short name for the ranks of a group, the same on all of them."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


standing = PerWorld(Standing)
"""That of this process."""
