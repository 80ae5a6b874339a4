"""Progress of long work, for people who watch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Is told how it goes, a line at a time."""
_MARK = "@ "
"""What a rank prints for those who watch begins with it."""


def timed_sayer() -> Say:
    """Prints lines with the seconds since now."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    return say


def say_from_rank(text: str) -> None:
    """Prints a line on the first rank, for `pass_on`."""
    if os.environ["RANK"] == "0":
        print(f"{_MARK}{text}", flush=True)


def pass_on(line: str, say: Say) -> None:
    """Says what a rank said; what else it printed is not for those who watch."""
    if line.startswith(_MARK):
        say(line.removeprefix(_MARK))
