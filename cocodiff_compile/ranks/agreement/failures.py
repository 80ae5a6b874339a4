"""Failures of ranks, told through the store of the world, so that those who wait can raise too.

A failure counts until the rank that failed begins another attempt to compile, unless it is of an
attempt that has ended with an error here too. It concerns the ranks that share a group with the
graph or call that failed; all ranks, as long as that is not known.

Attempts that all ranks of a group make together are counted, so that ranks know which attempt of
another rank belongs to which of theirs; they learn the difference of their counts when they meet.
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
from cocodiff_compile.ranks.agreement.standing import Ranks, group_key, standing
from cocodiff_compile.ranks.agreement.world import PerWorld, ranks_are_real, world_store

POLL_S = 0.05
LAST_WORDS_S = 5.0
"""How long a rank that raises stays for others to read why: the store may live in its process."""
_COUNT = "cocodiff/failures"
_TOLD = "_cocodiff_told_other_ranks"
"""Attribute of an exception that other ranks know of."""


@dataclass(frozen=True)
class Failure:
    """What a rank says of its failure."""

    rank: int
    text: str
    begun: int
    """How many attempts to compile it had begun."""
    together: int
    """How many of them together with other ranks."""
    calls: dict[str, int]
    """Calls of compiled code that it had begun, by group."""
    groups: list[list[int]] | None
    """Ranks of the groups that the failed graph communicates over; None if not known."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.text}"

    def concerns(self, ranks: Sequence[int]) -> bool:
        return self.rank in ranks and (self.groups is None or list(ranks) in self.groups)


@dataclass
class _Memory:
    """What this rank remembers of one world."""

    begun: int = 0
    together: int = 0
    is_alone: bool = False
    """Whether this attempt turned out to be one that no other rank takes part in."""
    groups: list[list[int]] | None = None
    met: set[int] = field(default_factory=set)
    """Ranks that came to this attempt."""
    ahead: dict[int, int] = field(default_factory=dict)
    """By rank: how many attempts together this one had counted more when they met."""
    failed: int = 0
    """The last attempt together that ended with an error."""
    failures_read: int = 0
    unheeded: list[Failure] = field(default_factory=list)
    heeded: dict[int, int] = field(default_factory=dict)
    """By rank: failures up to this attempt of it were raised here."""


_memory = PerWorld(_Memory)


def begin_attempt() -> None:
    """This rank begins to compile a graph: its earlier failures count no more."""
    memory = _memory.get()
    memory.begun += 1
    memory.together += 1
    memory.groups, memory.is_alone, memory.met = None, False, set()
    with suppress(dist.DistError):
        world_store().set(_begun_key(dist.get_rank()), str(memory.begun))


def concerns_groups(groups: Sequence[Ranks]) -> None:
    """From now on a failure of this attempt to compile concerns these groups only."""
    _memory.get().groups = [list(ranks) for ranks in groups]


def goes_alone() -> None:
    """No other rank takes part in this attempt."""
    memory = _memory.get()
    memory.is_alone = True
    memory.together -= 1


def attempts_together() -> int:
    """How many this rank has begun, with this one."""
    return _memory.get().together


def meet(together: Mapping[int, int]) -> None:
    """In this attempt together other ranks have come, whose counts are given."""
    memory = _memory.get()
    memory.met |= {*together}
    memory.ahead.update({rank: memory.together - theirs for rank, theirs in together.items()})


def end_attempt(error: BaseException) -> None:
    """The attempt ends with an error, which is told to the other ranks unless they know."""
    memory = _memory.get()
    if not isinstance(error, PeerError):
        tell(error, "failed to compile", memory.groups)
    if not memory.is_alone:
        memory.failed = memory.together


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
        "begun": _memory.get().begun,
        "together": _memory.get().together,
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


def read_failures() -> list[Failure]:
    """Failures of other ranks that count and that this rank has not raised."""
    store, memory = world_store(), _memory.get()
    with standing.get().lock:
        for number in range(memory.failures_read + 1, store.add(_COUNT, 0) + 1):
            key = f"cocodiff/failure/{number}"
            if not store.check([key]):
                break  # counted, and not yet written
            memory.failures_read = number
            failure = Failure(**json.loads(store.get(key)))
            store.set(_read_key(number, dist.get_rank()), "")
            if failure.rank != dist.get_rank():
                memory.unheeded.append(failure)
        memory.unheeded = [item for item in memory.unheeded if not _is_over(item)]
        return list(memory.unheeded)


def _is_over(failure: Failure) -> bool:
    memory, store = _memory.get(), world_store()
    rank, key = failure.rank, _begun_key(failure.rank)
    attempt = failure.together + memory.ahead.get(rank, 0)
    if attempt <= memory.failed or failure.begun <= memory.heeded.get(rank, 0):
        return True
    if attempt == memory.together and rank in memory.met:
        return False  # even if the rank has begun another: this one waits for it in vain
    return bool(store.check([key])) and int(store.get(key)) > failure.begun


def failure_of(ranks: Ranks, calls: int) -> Failure | None:
    """The failure for which one of `ranks` will not take part in what this rank waits for, having
    begun `calls` calls over their group; None if none of them has failed.
    """
    for failure in read_failures():
        is_behind = failure.calls.get(group_key(ranks), 0) >= calls - 1
        if failure.concerns(ranks) and is_behind:
            return failure
    return None


def heed(failure: Failure) -> None:
    """This rank raises because of it, once."""
    _memory.get().heeded[failure.rank] = failure.begun
