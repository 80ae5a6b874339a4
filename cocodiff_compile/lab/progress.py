"""Progress of long work, for people who watch."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Is told how it goes, a line at a time."""


def timed_sayer() -> Say:
    """Prints lines with the seconds since now."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    return say
