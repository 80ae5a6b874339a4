# SPDX-License-Identifier: Apache-2.0
"""Holds the state of this rank in each group: the rounds and calls it has taken part in, what it
runs, and why its groups were closed.

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
"""(name, value) pairs that ranks compare."""

Ranks: TypeAlias = "tuple[int, ...]"
"""The global ranks of a group."""


@dataclass(frozen=True)
class RunPlan:
    """Describes what a call communicates over one group, with the sizes of the call."""

    captured: tuple[tuple[str, str], ...]
    """Versions, options and captured collectives, compared before code is generated."""
    planned: tuple[tuple[str, str], ...]
    """The exchanges and collectives after all passes."""

    @property
    def facts(self) -> Facts:
        return [*self.captured, *self.planned]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.facts).encode()).hexdigest()


@dataclass
class GroupState:
    """Holds the state of this rank in one group."""

    rounds: int = 0
    """The number of rounds of compilations that took place."""
    calls: int = 0
    """The number of calls that began."""
    plan: RunPlan | None = None
    """The plan of the last call; None if the next call must be compared whatever it runs."""
    running_since: float | None = None
    """When the code of the last call began to run; None while none runs."""
    last_compared: int | None = None
    """The last call before which the ranks compared plans."""
    input_call: int = 0
    """The last call before which this rank compared its inputs."""
    input_rounds: int = 0
    """How many comparisons before that call there were after the first one."""
    last_inputs: str = ""
    """The key of this rank's digests in the last comparison."""
    compared_outside: set[str] = field(default_factory=set)
    """The collectives outside of compiled code that were compared, in words."""
    closed: str = ""
    """Why this rank closed its groups of these ranks; empty while they are open."""


@dataclass
class RankState:
    """Holds the state of this rank in all groups of one world."""

    groups: dict[Ranks, GroupState] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    """The digests of plans that this rank has written to the store."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by the main or the watch thread while it reads failures or answers other ranks."""

    def group(self, ranks: Ranks) -> GroupState:
        return self.groups.setdefault(ranks, GroupState())

    @property
    def calls(self) -> Mapping[str, int]:
        """The number of calls that began, by the key of the group."""
        return {group_key(ranks): group.calls for ranks, group in list(self.groups.items())}


def group_key(ranks: Ranks) -> str:
    """Returns a short name for the ranks of a group, the same on all of them."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


rank_state = PerWorld(RankState)
"""The state of this process."""
