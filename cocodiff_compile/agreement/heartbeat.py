"""Signs of life of a rank that compiles, in the store of the world."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

BEAT_S = 2.0
SILENCE_S = 30.0
"""A rank that compiles and has not beaten for so long is dead: fifteen beats are missing."""

_AT_REST = b"0"


def _key(rank: int) -> str:
    return f"cocodiff/alive/{rank}"


@contextmanager
def beating(store: Any, rank: int) -> Iterator[None]:
    """Beats in a thread of its own until the block ends."""
    stop = threading.Event()

    def beat() -> None:
        number = 0
        # The store goes with its process; whoever waits for this rank finds out by itself.
        with suppress(RuntimeError):
            while not stop.is_set():
                number += 1
                store.set(_key(rank), str(number))
                stop.wait(BEAT_S)
            store.set(_key(rank), _AT_REST)

    thread = threading.Thread(target=beat, name="cocodiff-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Listener:
    """Watches the beats of other ranks."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that began to compile and stopped beating without coming to an end."""
        now = time.monotonic()
        return [rank for rank in ranks if self._silence_s(rank, now) > SILENCE_S]

    def _silence_s(self, rank: int, now: float) -> float:
        if not self._store.check([_key(rank)]):
            return 0.0
        beat = self._store.get(_key(rank))
        before = self._last.get(rank)
        if beat == _AT_REST or before is None or before[0] != beat:
            self._last[rank] = beat, now
            return 0.0
        return now - before[1]
