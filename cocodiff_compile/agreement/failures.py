"""Failures of ranks, told through the store of the world, so that those who wait can raise too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cocodiff_compile.agreement.world import PerWorld, ranks_are_real
from cocodiff_compile.compat import default_store
from cocodiff_compile.errors import PeerError

POLL_S = 0.05
LAST_WORDS_S = 10.0
"""How long a rank that raises stays for others to read why: the store may live in its process."""

_COUNT = "cocodiff/failures"


@dataclass
class _Memory:
    """What this rank remembers of one world."""

    attempts: int = 0
    failures_before: int = 0
    failures_read: int = 0


_memory = PerWorld(_Memory)


@contextmanager
def failures_told() -> Iterator[None]:
    """One attempt to compile; if it raises, the ranks that wait for this one raise as well."""
    if not ranks_are_real():
        yield
        return
    memory = _memory.get()
    memory.attempts += 1
    with suppress(dist.DistError):
        memory.failures_before = default_store().add(_COUNT, 0)
    try:
        yield
    except PeerError:
        raise  # the others know
    except Exception as error:
        with suppress(dist.DistError):
            _tell(error)
        raise


def _tell(error: Exception) -> None:
    store, rank = default_store(), dist.get_rank()
    number = store.add(_COUNT, 1)
    text = f"{type(error).__name__}: {error}"
    record = {"rank": rank, "text": text, "attempt": _memory.get().attempts}
    store.set(f"cocodiff/failure/{number}", json.dumps(record))
    waiting = {other for other in range(dist.get_world_size()) if other != rank}
    end = time.monotonic() + LAST_WORDS_S
    while waiting and time.monotonic() < end:
        waiting -= {failure["rank"] for failure in new_failures()}
        waiting -= {other for other in waiting if store.check([_read_key(number, other)])}
        time.sleep(POLL_S)


def _read_key(number: int, rank: int) -> str:
    return f"cocodiff/failure/{number}/read/{rank}"


def new_failures() -> Iterator[dict[str, Any]]:
    """Those this rank has not read, without those of earlier attempts that are over."""
    store, memory = default_store(), _memory.get()
    for number in range(memory.failures_read + 1, store.add(_COUNT, 0) + 1):
        key = f"cocodiff/failure/{number}"
        if not store.check([key]):
            return  # counted, and not yet written
        memory.failures_read = number
        failure: dict[str, Any] = json.loads(store.get(key))
        is_over = number <= memory.failures_before and failure["attempt"] < memory.attempts
        store.set(_read_key(number, dist.get_rank()), "")
        if not is_over and failure["rank"] != dist.get_rank():
            yield failure


def raise_failures(ranks: Sequence[int]) -> None:
    """Raises if one of `ranks` has failed."""
    for failure in new_failures():
        if failure["rank"] in ranks:
            raise PeerError(f"rank {failure['rank']} failed to compile: {failure['text']}")
