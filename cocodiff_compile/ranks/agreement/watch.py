# SPDX-License-Identifier: Apache-2.0
"""Runs a watch thread that sends heartbeats, and that listens to other ranks while compiled code
runs for long.

A rank that waits in a collective can neither answer nor raise. Its watch thread answers ranks that
ask what it runs, and reads the failures of others. If the collective can never end, the watch
thread closes the groups, so that it raises, and records why (`GroupState.closed`).
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from cocodiff_compile.errors import PeerError, UserError
from cocodiff_compile.ranks.agreement.call_rounds import answer
from cocodiff_compile.ranks.agreement.close_groups import close_groups
from cocodiff_compile.ranks.agreement.failures import (
    begin_attempt,
    end_attempt,
    failure_of,
    is_reported,
    report_failure,
)
from cocodiff_compile.ranks.agreement.heartbeat import BEAT_S, announce_end, beat, left_before
from cocodiff_compile.ranks.agreement.rank_state import Ranks, RankState, group_key, rank_state
from cocodiff_compile.ranks.agreement.same_inputs import answer_inputs
from cocodiff_compile.ranks.agreement.waiting import (
    announce_closed,
    closed_by_others,
    store_is_gone,
)
from cocodiff_compile.ranks.agreement.world import (
    PerWorld,
    own_connection,
    ranks_are_real,
    world_store,
)

log = logging.getLogger(__name__)

TICK_S = 0.5
RUNS_LONG_S = 1.0
EXIT_LINGER_S = 5.0
"""How long a process that ends with an error stays alive for others to read it."""


class _Watch:
    """Watches one world and ends with it. It holds no store, which would outlive the world."""

    def __init__(self) -> None:
        self._world: Any = weakref.ref(dist.group.WORLD)
        self._rank = dist.get_rank()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cocodiff-watch", daemon=True)
        self._thread.start()
        # Without this the interpreter may end in the middle of a call to the store.
        atexit.register(self.end)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if self._is_of_this_world():
            error = getattr(sys, "last_value", None)
            if error is not None and not is_reported(error):
                report_failure(error, "ended", None, EXIT_LINGER_S)
            with suppress(dist.DistError):
                announce_end(world_store(), self._rank, rank_state.get().calls)

    def _is_of_this_world(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._world()

    def _run(self) -> None:
        own = rank_state.get()
        # Ranks that wait for this one notice by themselves that the store or the world is gone.
        with suppress(RuntimeError, AssertionError, ValueError), own_connection():
            try:
                self._beat_and_check(own)
            except dist.DistError as error:
                _close_with_the_store(own, error)

    def _beat_and_check(self, own: RankState) -> None:
        number, beaten = 0, float("-inf")
        while not self._stop.is_set():
            if not self._is_of_this_world():
                announce_end(world_store(), self._rank, own.calls)
                return  # this rank has left its process group
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                number, beaten = number + 1, now
                beat(world_store(), self._rank, number)
            _check_groups(own, now)
            self._stop.wait(TICK_S)


def _check_groups(own: RankState, now: float) -> None:
    for ranks, group in list(own.groups.items()):
        since = group.running_since
        if group.closed or since is None or now - since < RUNS_LONG_S:
            continue
        with own.lock:
            answer_inputs(ranks, group)
            cause = find_cause(ranks, group.calls) or answer(ranks, group)
        if cause and group.running_since == since:
            close(ranks, cause)


@contextmanager
def watched(ranks: Ranks) -> Iterator[None]:
    """Marks a block that runs collectives of these ranks outside of compiled code. If one of them
    fails meanwhile, this rank raises with its message instead of waiting for it.
    """
    if not ranks_are_real():
        yield
        return
    group = rank_state.get().group(ranks)
    before, group.running_since = group.running_since, time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if group.closed and not isinstance(error, UserError):
            raise PeerError(group.closed) from error
        raise
    finally:
        group.running_since = before


def _close_with_the_store(own: RankState, error: Exception) -> None:
    """Closes the running groups of rank 0 when the store is gone, and with it its process."""
    for ranks, group in list(own.groups.items()):
        if group.running_since is not None and 0 in ranks and not group.closed:
            _close(ranks, store_is_gone(error))


def find_cause(ranks: Ranks, calls: int) -> str:
    """Returns why the last call over a group can never end, as others report; empty if unknown."""
    if failure := failure_of(ranks, calls):
        return str(failure)
    if cause := closed_by_others(ranks):
        return cause
    others = [rank for rank in ranks if rank != dist.get_rank()]
    left = left_before(world_store(), others, group_key(ranks), calls)
    return f"ranks {left} have ended or left the process group: see their output" * bool(left)


def close(ranks: Ranks, cause: str) -> None:
    """Closes the groups of these ranks: collectives over them raise, now and later."""
    announce_closed(ranks, cause)
    _close(ranks, cause)


def _close(ranks: Ranks, cause: str) -> None:
    for other, group in list(rank_state.get().groups.items()):
        if {*other} <= {*ranks}:
            group.closed = cause
    close_groups(ranks)


_watches: PerWorld[_Watch] = PerWorld(_Watch)


@contextmanager
def reports_failures() -> Iterator[None]:
    """Wraps one attempt to compile. If it raises, the ranks that wait for this one raise too."""
    if not ranks_are_real():
        yield
        return
    _watches.get()  # starts the watch thread of this world, unless it runs
    begin_attempt()
    try:
        yield
    except BaseException as error:
        end_attempt(error)
        raise
