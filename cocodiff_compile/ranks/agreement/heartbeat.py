# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the heartbeats of ranks in the store, from their first compilation on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

BEAT_S = 2.0
SILENCE_S = 20.0
"""A rank that others wait for is dead after this long without a heartbeat: it missed ten."""

_ENDED = b"ended "


def _key(rank: int) -> str:
    return f"cocodiff/alive/{rank}"


def beat(store: Any, rank: int, number: int) -> None:
    store.set(_key(rank), str(number))


def announce_end(store: Any, rank: int, calls: Mapping[str, int]) -> None:
    """Writes the last sign of a rank that ends in order, after `calls` calls over each group."""
    store.set(_key(rank), _ENDED + json.dumps(dict(calls)).encode())


def left_before(store: Any, ranks: Sequence[int], group: str, call: int) -> list[int]:
    """Returns those of `ranks` that have ended before a call over a group of them."""
    heard = {rank: store.get(_key(rank)) for rank in ranks if store.check([_key(rank)])}
    return [
        rank
        for rank, last in heard.items()
        if last.startswith(_ENDED) and json.loads(last[len(_ENDED) :]).get(group, 0) < call
    ]


class Listener:
    """Watches the heartbeats of other ranks."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent(self, ranks: Sequence[int], silence_s: float | None = None) -> list[int]:
        """Returns those of `ranks` that have ended, or whose heartbeat stopped for `silence_s`
        (default: `SILENCE_S`) while this listener watched.
        """
        now, allowed_s = time.monotonic(), SILENCE_S if silence_s is None else silence_s
        return [rank for rank in ranks if self._silence_s(rank, now) > allowed_s]

    def _silence_s(self, rank: int, now: float) -> float:
        if not self._store.check([_key(rank)]):
            return 0.0
        heard = self._store.get(_key(rank))
        if heard.startswith(_ENDED):
            return float("inf")
        before = self._last.get(rank)
        if before is None or before[0] != heard:
            self._last[rank] = heard, now
            return 0.0
        return now - before[1]
