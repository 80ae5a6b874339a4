"""Failures of ranks, told through the store of the world, so that those who wait can raise too.

A failure counts until the rank that failed begins another attempt to compile. It concerns the ranks
that share a group with the graph or call that failed; all ranks, as long as that is not known.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from cocodiff_compile.agreement.standing import Ranks, group_key, standing
from cocodiff_compile.agreement.world import PerWorld, ranks_are_real, world_store
from cocodiff_compile.errors import PeerError

POLL_S = 0.05
LAST_WORDS_S = 5.0
"""How long a rank that raises stays for others to read why: the store may live in its process."""
DOUBT_S = LAST_WORDS_S + 2.0
"""A rank that failed tries again within this time, if it does so at once."""

_COUNT = "cocodiff/failures"
_TOLD = "_cocodiff_told_other_ranks"
"""Attribute of an exception that other ranks know of."""


@dataclass(frozen=True)
class Failure:
    """What a rank says of its failure."""

    rank: int
    text: str
    attempt: int
    """How many compiles it had begun."""
    calls: dict[str, int]
    """Calls of compiled code that it had begun, by group."""
    groups: list[list[int]] | None
    """Ranks of the groups that the failed graph communicates over; None if not known."""
    read_s: float = 0.0
    """When this rank read it."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.text}"

    def concerns(self, ranks: Sequence[int]) -> bool:
        return self.rank in ranks and (self.groups is None or list(ranks) in self.groups)


@dataclass
class _Memory:
    """What this rank remembers of one world."""

    attempts: int = 0
    groups: list[list[int]] | None = None
    failures_read: int = 0
    unheeded: list[Failure] = field(default_factory=list)
    """Those read and not yet raised."""
    met: dict[int, int] = field(default_factory=dict)
    """By rank: its attempt, if this attempt has met it in a round."""
    over: dict[int, int] = field(default_factory=dict)
    """By rank: its attempts up to this one were over when one of this rank ended with an error."""
    doubtful: dict[int, int] = field(default_factory=dict)
    """By rank: the attempt it was in then, without having met; it may have been the same."""


_memory = PerWorld(_Memory)


def begin_attempt() -> None:
    """This rank begins to compile a graph: its earlier failures count no more."""
    memory = _memory.get()
    memory.attempts += 1
    memory.groups, memory.met = None, {}
    with suppress(dist.DistError):
        world_store().set(_begun_key(dist.get_rank()), str(memory.attempts))


def this_attempt() -> int:
    return _memory.get().attempts


def meet(attempts: Mapping[int, int]) -> None:
    """The attempt that other ranks are in was compared with the one this rank is in."""
    _memory.get().met.update(attempts)


def end_attempt(error: BaseException) -> None:
    """The attempt ends with an error, which is told to the other ranks unless they know."""
    memory = _memory.get()
    if not isinstance(error, PeerError):
        tell(error, "failed to compile", memory.groups)
    with suppress(dist.DistError):
        world_store().set(_ended_key(dist.get_rank()), str(memory.attempts))
        for rank in range(dist.get_world_size()):
            begun, ended = _number(_begun_key(rank)), _number(_ended_key(rank))
            last = memory.met.get(rank, ended)  # who met me may be in its next attempt already
            memory.over[rank] = max(last, memory.over.get(rank, 0))
            memory.doubtful[rank] = 0 if rank in memory.met else begun


def _number(key: str) -> int:
    store = world_store()
    return int(store.get(key)) if store.check([key]) else 0


def concerns_groups(groups: Sequence[Ranks]) -> None:
    """From now on a failure of this attempt to compile concerns these groups only."""
    _memory.get().groups = [list(ranks) for ranks in groups]


def tell(
    error: BaseException,
    what: str,
    groups: Sequence[Sequence[int]] | None,
    last_words_s: float = LAST_WORDS_S,
) -> None:
    """Tells the other ranks once that this one `what`, and stays until they have read it."""
    if getattr(error, _TOLD, False) or not ranks_are_real():
        return
    setattr(error, _TOLD, True)
    text = f"{what}: {type(error).__name__}: {error}".removesuffix(": ")
    with suppress(dist.DistError):
        _tell(text, groups, last_words_s)


def is_told(error: BaseException | None) -> bool:
    """Whether the ranks know of an exception, or of one that it came of."""
    while error is not None:
        if isinstance(error, PeerError) or getattr(error, _TOLD, False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tell(text: str, groups: Sequence[Sequence[int]] | None, last_words_s: float) -> None:
    store, rank = world_store(), dist.get_rank()
    known = None if groups is None else [list(ranks) for ranks in groups]
    number = store.add(_COUNT, 1)
    failure = {
        "rank": rank,
        "text": text,
        "attempt": this_attempt(),
        "calls": dict(standing.get().calls),
        "groups": known,
    }
    store.set(f"cocodiff/failure/{number}", json.dumps(failure))
    concerned = range(dist.get_world_size()) if known is None else itertools.chain(*known)
    waiting = {*concerned} - {rank}
    end = time.monotonic() + last_words_s
    while waiting and time.monotonic() < end:
        waiting -= {other.rank for other in read_failures()}
        waiting -= {other for other in waiting if store.check([_read_key(number, other)])}
        time.sleep(POLL_S)


def _read_key(number: int, rank: int) -> str:
    return f"cocodiff/failure/{number}/read/{rank}"


def _begun_key(rank: int) -> str:
    return f"cocodiff/attempt/{rank}"


def _ended_key(rank: int) -> str:
    return f"cocodiff/attempt/{rank}/ended with an error"


def read_failures() -> list[Failure]:
    """Failures of other ranks that count and that this rank has not raised."""
    store, memory = world_store(), _memory.get()
    with standing.get().lock:
        for number in range(memory.failures_read + 1, store.add(_COUNT, 0) + 1):
            key = f"cocodiff/failure/{number}"
            if not store.check([key]):
                break  # counted, and not yet written
            memory.failures_read = number
            failure = Failure(**json.loads(store.get(key)), read_s=time.monotonic())
            store.set(_read_key(number, dist.get_rank()), "")
            if failure.rank != dist.get_rank():
                memory.unheeded.append(failure)
        memory.unheeded = [item for item in memory.unheeded if not _is_over(item)]
        return list(memory.unheeded)


def _is_over(failure: Failure) -> bool:
    has_ended_here = failure.attempt <= _memory.get().over.get(failure.rank, 0)
    return has_ended_here or _number(_begun_key(failure.rank)) > failure.attempt


def failure_of(ranks: Ranks, calls: int) -> Failure | None:
    """The failure for which one of `ranks` will not take part in what this rank waits for, having
    begun `calls` calls over their group; None if none of them has failed.
    """
    for failure in read_failures():
        is_behind = failure.calls.get(group_key(ranks), 0) >= calls - 1
        if failure.concerns(ranks) and is_behind and not _is_doubtful(failure):
            return failure
    return None


def heed(failure: Failure) -> None:
    """This rank raises because of it, once."""
    over = _memory.get().over
    over[failure.rank] = max(over.get(failure.rank, 0), failure.attempt)


def _is_doubtful(failure: Failure) -> bool:
    """Whether it may be of an attempt that has ended here too, and the rank may soon try again."""
    memory, rank = _memory.get(), failure.rank
    is_of_this = memory.met.get(rank) == failure.attempt
    is_of_last = memory.doubtful.get(rank, 0) == failure.attempt
    return is_of_last and not is_of_this and time.monotonic() - failure.read_s < DOUBT_S
