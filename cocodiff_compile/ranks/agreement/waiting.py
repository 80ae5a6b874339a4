# SPDX-License-Identifier: Apache-2.0
"""Waits for other ranks, as long as they live and as the timeout of the world allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from cocodiff_compile.errors import PeerError, UserError
from cocodiff_compile.ranks.agreement.failures import LINGER_S, POLL_S, failure_of, mark_raised
from cocodiff_compile.ranks.agreement.heartbeat import Listener
from cocodiff_compile.ranks.agreement.rank_state import Ranks, group_key, rank_state
from cocodiff_compile.ranks.agreement.world import world_store

log = logging.getLogger(__name__)

CHECK_S = 1.0
WARN_S = 30.0
_FIRST_POLL_S = 5e-4
"""The first polling interval; it grows, because ranks mostly come at the same time."""


@contextmanager
def explain_store_errors() -> Iterator[None]:
    """Raises PeerError with an explanation if the store cannot be reached."""
    try:
        yield
    except dist.DistError as error:
        raise PeerError(store_is_gone(error)) from None


def store_is_gone(error: Exception) -> str:
    return (
        "the store of the process group cannot be reached: the process that holds it, rank 0 "
        f"or the launcher, has ended; see its output ({error})"
    )


def wait_for(
    keys: Mapping[int, str], stage: str, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Returns when every rank has set its key. Raises if one fails, dies or does not come.
    `meanwhile` is called about once a second.
    """
    store, ranks = world_store(), tuple(keys)
    listener = Listener(store)
    begin = looked = time.monotonic()
    poll_s, said = _FIRST_POLL_S, False
    while not store.check(list(keys.values())):
        raise_failures(ranks)
        now = time.monotonic()
        if now - looked > CHECK_S:
            looked = now
            meanwhile()
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            _raise_lost(missing, listener, now - begin, stage)
            if now - begin > WARN_S and not said:
                said = True
                log.warning("waiting for ranks %s to reach the stage %r", missing, stage)
        time.sleep(poll_s)
        poll_s = min(POLL_S, 2 * poll_s)


def raise_failures(ranks: Ranks) -> None:
    """Raises if one of `ranks` has failed, or has closed the group."""
    if failure := failure_of(ranks, rank_state.get().group(ranks).calls):
        mark_raised(failure)
        raise PeerError(str(failure))
    if cause := closed_by_others(ranks):
        raise PeerError(cause)


def announce_closed(ranks: Ranks, cause: str) -> None:
    """Publishes why this rank closes a group, unless another rank has."""
    store, key = world_store(), _closed_key(ranks)
    if not store.check([key]):
        store.set(key, cause)
    store.set(f"{key}/{dist.get_rank()}", "")


def closed_by_others(ranks: Ranks) -> str:
    """Returns why a rank of the group has closed it; an empty string if none has."""
    store, key = world_store(), _closed_key(ranks)
    if not store.check([key]):
        return ""
    store.set(f"{key}/{dist.get_rank()}", "")
    cause: str = store.get(key).decode()
    return cause


def linger_until_closed(ranks: Ranks) -> None:
    """Gives the other ranks time to read why the group is closed before this process may end."""
    linger_until_read([f"{_closed_key(ranks)}/{rank}" for rank in ranks])


def _closed_key(ranks: Ranks) -> str:
    return f"cocodiff/closed/{group_key(ranks)}"


def _raise_lost(missing: Sequence[int], listener: Listener, waited_s: float, stage: str) -> None:
    if not missing:
        return
    # Both are reported to the other ranks, which may not have noticed, as a failure of this one.
    if silent := listener.silent(missing):
        raise UserError(
            f"ranks {silent} ended, were killed or hang, before the stage {stage!r}: see their "
            "output"
        )
    timeout_s = world_store().timeout.total_seconds()
    if waited_s > timeout_s:
        raise UserError(
            f"ranks {list(missing)} did not come to {stage!r} within {timeout_s:.0f} s, the "
            "timeout of the process group: see their output, they failed or run other code"
        )


def linger_until_read(keys: Sequence[str]) -> None:
    """Gives the other ranks time to set these keys before this process may end."""
    end = time.monotonic() + LINGER_S
    while not world_store().check(list(keys)) and time.monotonic() < end:
        time.sleep(POLL_S)
