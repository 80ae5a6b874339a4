"""Waiting for other ranks, as long as they live and as the world's timeout allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from cocodiff_compile.agreement.failures import LAST_WORDS_S, POLL_S, raise_failures
from cocodiff_compile.agreement.heartbeat import Listener
from cocodiff_compile.compat import default_store
from cocodiff_compile.errors import PeerError, UserError

log = logging.getLogger(__name__)

LOOK_S = 1.0
SAY_S = 30.0


@contextmanager
def store_reached() -> Iterator[None]:
    """Says in words that the store is gone."""
    try:
        yield
    except dist.DistError as error:
        raise PeerError(
            "the store of the process group cannot be reached: the process that holds it, rank 0 "
            f"or the launcher, has ended; look at its output ({error})"
        ) from None


def wait_for(keys: Mapping[int, str], stage: str) -> None:
    """Returns when every rank has set its key; raises if one fails, dies or stays away."""
    store = default_store()
    listener = Listener(store)
    begin = looked = time.monotonic()
    said = False
    while not store.check(list(keys.values())):
        raise_failures(list(keys))
        now = time.monotonic()
        if now - looked > LOOK_S:
            looked = now
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            _raise_lost(missing, listener, now - begin, stage)
            if now - begin > SAY_S and not said:
                said = True
                log.warning("waiting for ranks %s to reach the stage %r", missing, stage)
        time.sleep(POLL_S)


def _raise_lost(missing: Sequence[int], listener: Listener, waited_s: float, stage: str) -> None:
    # Both are told to the others, who may not have noticed, as a failure of this rank.
    if silent := listener.silent(missing):
        raise UserError(
            f"ranks {silent} died while compiling, before the stage {stage!r}: look at their output"
        )
    timeout_s = default_store().timeout.total_seconds()
    if waited_s > timeout_s:
        raise UserError(
            f"ranks {list(missing)} did not come to compile the same graph within {timeout_s:.0f} "
            f"s, the timeout of the process group (stage {stage!r}): look at their output, they "
            "failed or run other code"
        )


def stay_until_read(keys: Sequence[str]) -> None:
    """Gives the other ranks time to set these keys before this process may end."""
    end = time.monotonic() + LAST_WORDS_S
    while not default_store().check(list(keys)) and time.monotonic() < end:
        time.sleep(POLL_S)
