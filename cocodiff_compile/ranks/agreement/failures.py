# SPDX-License-Identifier: Apache-2.0
"""Reports failures of ranks through the store of the world, so that ranks that wait can raise too.

A failure is valid until the failed rank begins another attempt to compile, unless it belongs to an
attempt that has ended with an error on this rank too. It concerns the ranks that share a group with
the graph or call that failed, and all ranks as long as these groups are unknown.

Attempts that all ranks of a group make jointly are counted, so that ranks know which attempt of
another rank corresponds to which of theirs; they learn the difference of their counts in a round.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from cocodiff_compile.errors import PeerError
from cocodiff_compile.ranks.agreement.rank_state import Ranks, group_key, rank_state
from cocodiff_compile.ranks.agreement.world import PerWorld, ranks_are_real, world_store

POLL_S = 0.05
LINGER_S = 5.0
"""How long a rank that raises stays alive for others to read why: it may hold the store."""
_COUNT = "cocodiff/failures"
_REPORTED = "_cocodiff_told_other_ranks"
"""The attribute of an exception that was reported to other ranks."""


@dataclass(frozen=True)
class Failure:
    """Describes the failure of a rank."""

    rank: int
    text: str
    begun: int
    """The number of attempts to compile that the rank had begun."""
    joint: int
    """The number of these attempts that it made jointly with other ranks."""
    calls: dict[str, int]
    """The calls of compiled code that it had begun, by group."""
    groups: list[list[int]] | None
    """The ranks of the groups that the failed graph communicates over; None if unknown."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.text}"

    def concerns(self, ranks: Sequence[int]) -> bool:
        return self.rank in ranks and (self.groups is None or list(ranks) in self.groups)


@dataclass
class _Attempts:
    """Holds the attempts and failures that this rank knows of in one world."""

    begun: int = 0
    joint: int = 0
    is_local: bool = False
    """Whether no other rank takes part in this attempt."""
    groups: list[list[int]] | None = None
    peers_seen: set[int] = field(default_factory=set)
    """The ranks that came to this attempt."""
    counted_ahead: dict[int, int] = field(default_factory=dict)
    """How many more joint attempts than each rank this one had counted when they met."""
    failed: int = 0
    """The last joint attempt that ended with an error."""
    failures_read: int = 0
    unraised: list[Failure] = field(default_factory=list)
    raised: dict[int, int] = field(default_factory=dict)
    """The last attempt of each rank whose failure was raised here."""


_attempts = PerWorld(_Attempts)


def begin_attempt() -> None:
    """Begins an attempt of this rank to compile a graph, which ends its earlier failures."""
    attempts = _attempts.get()
    attempts.begun += 1
    attempts.joint += 1
    attempts.groups, attempts.is_local, attempts.peers_seen = None, False, set()
    with suppress(dist.DistError):
        world_store().set(_begun_key(dist.get_rank()), str(attempts.begun))


def concerns_groups(groups: Sequence[Ranks]) -> None:
    """Limits a later failure of this attempt to these groups."""
    _attempts.get().groups = [list(ranks) for ranks in groups]


def mark_local_attempt() -> None:
    """Marks this attempt as one that no other rank takes part in."""
    attempts = _attempts.get()
    attempts.is_local = True
    attempts.joint -= 1


def joint_attempts() -> int:
    """Returns the number of joint attempts that this rank has begun, this one included."""
    return _attempts.get().joint


def record_peers(joint: Mapping[int, int]) -> None:
    """Records that other ranks, with these counts of joint attempts, came to this attempt."""
    attempts = _attempts.get()
    attempts.peers_seen |= {*joint}
    attempts.counted_ahead.update({rank: attempts.joint - theirs for rank, theirs in joint.items()})


def end_attempt(error: BaseException) -> None:
    """Ends the attempt with an error, and reports it to the other ranks unless they know of it."""
    attempts = _attempts.get()
    if not isinstance(error, PeerError):
        report_failure(error, "failed to compile", attempts.groups)
    if not attempts.is_local:
        attempts.failed = attempts.joint


def report_failure(
    error: BaseException,
    what: str,
    groups: Sequence[Sequence[int]] | None,
    linger_s: float = LINGER_S,
) -> None:
    """Reports once that this rank failed at `what`, and waits until the others have read it."""
    if getattr(error, _REPORTED, False) or not ranks_are_real():
        return
    setattr(error, _REPORTED, True)
    text = f"{what}: {type(error).__name__}: {error}".removesuffix(": ")
    with suppress(dist.DistError):
        _report_failure(text, groups, linger_s)


def is_reported(error: BaseException | None) -> bool:
    """Returns whether the ranks know of an exception, or of one that caused it."""
    while error is not None:
        if isinstance(error, PeerError) or getattr(error, _REPORTED, False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report_failure(text: str, groups: Sequence[Sequence[int]] | None, linger_s: float) -> None:
    store, rank = world_store(), dist.get_rank()
    known = None if groups is None else [list(ranks) for ranks in groups]
    number = store.add(_COUNT, 1)
    failure = {
        "rank": rank,
        "text": text,
        "begun": _attempts.get().begun,
        "joint": _attempts.get().joint,
        "calls": dict(rank_state.get().calls),
        "groups": known,
    }
    store.set(f"cocodiff/failure/{number}", json.dumps(failure))
    concerned = range(dist.get_world_size()) if known is None else itertools.chain(*known)
    waiting = {*concerned} - {rank}
    end = time.monotonic() + linger_s
    while waiting and time.monotonic() < end:
        waiting -= {other.rank for other in read_failures()}
        waiting -= {other for other in waiting if store.check([_read_key(number, other)])}
        time.sleep(POLL_S)


def _read_key(number: int, rank: int) -> str:
    return f"cocodiff/failure/{number}/read/{rank}"


def _begun_key(rank: int) -> str:
    return f"cocodiff/attempt/{rank}"


def read_failures() -> list[Failure]:
    """Returns the valid failures of other ranks that this rank has not raised."""
    store, attempts = world_store(), _attempts.get()
    with rank_state.get().lock:
        for number in range(attempts.failures_read + 1, store.add(_COUNT, 0) + 1):
            key = f"cocodiff/failure/{number}"
            if not store.check([key]):
                break  # counted, and not yet written
            attempts.failures_read = number
            failure = Failure(**json.loads(store.get(key)))
            store.set(_read_key(number, dist.get_rank()), "")
            if failure.rank != dist.get_rank():
                attempts.unraised.append(failure)
        attempts.unraised = [item for item in attempts.unraised if not _is_over(item)]
        return list(attempts.unraised)


def _is_over(failure: Failure) -> bool:
    attempts, store = _attempts.get(), world_store()
    rank, key = failure.rank, _begun_key(failure.rank)
    attempt = failure.joint + attempts.counted_ahead.get(rank, 0)
    if attempt <= attempts.failed or failure.begun <= attempts.raised.get(rank, 0):
        return True
    if attempt == attempts.joint and rank in attempts.peers_seen:
        return False  # even if the rank has begun another: it will not take part in this one
    return bool(store.check([key])) and int(store.get(key)) > failure.begun


def failure_of(ranks: Ranks, calls: int) -> Failure | None:
    """Returns the failure because of which one of `ranks` will not take part in what this rank,
    after `calls` calls over their group, waits for; None if there is none.
    """
    for failure in read_failures():
        is_behind = failure.calls.get(group_key(ranks), 0) >= calls - 1
        if failure.concerns(ranks) and is_behind:
            return failure
    return None


def mark_raised(failure: Failure) -> None:
    """Marks a failure as raised on this rank, so that it is raised once."""
    _attempts.get().raised[failure.rank] = failure.begun
