"""Signs of life of every rank that has begun to compile, in the store of the world."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

BEAT_S = 2.0
SILENCE_S = 20.0
"""A rank that others wait for and that has not beaten for so long is dead: it missed ten beats."""

_ENDED = b"ended "


def _key(rank: int) -> str:
    return f"cocodiff/alive/{rank}"


def beat(store: Any, rank: int, number: int) -> None:
    store.set(_key(rank), str(number))


def say_ended(store: Any, rank: int, calls: Mapping[str, int]) -> None:
    """The last sign of a rank that leaves in order, after so many calls over each group."""
    store.set(_key(rank), _ENDED + json.dumps(dict(calls)).encode())


def left_before(store: Any, ranks: Sequence[int], group: str, call: int) -> list[int]:
    """Those of `ranks` that have left before a call over a group of them."""
    heard = {rank: store.get(_key(rank)) for rank in ranks if store.check([_key(rank)])}
    return [
        rank
        for rank, last in heard.items()
        if last.startswith(_ENDED) and json.loads(last[len(_ENDED) :]).get(group, 0) < call
    ]


class Listener:
    """Watches the beats of other ranks."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent(self, ranks: Sequence[int], silence_s: float | None = None) -> list[int]:
        """Those of `ranks` that beat once and have ended, or have not beaten for `silence_s`,
        `SILENCE_S` unless it is given, while this listener watched.
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
