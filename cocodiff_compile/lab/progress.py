"""Reports the progress of long work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Receives progress messages, one line each."""
_MARK = "@ "
"""The prefix of a progress message in the output of a rank."""


def timed_sayer() -> Say:
    """Returns a function that prints lines with the seconds since now."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    return say


def say_from_rank(text: str) -> None:
    """Prints a progress message on the first rank, for `pass_on`."""
    if os.environ["RANK"] == "0":
        print(f"{_MARK}{text}", flush=True)


def pass_on(line: str, say: Say) -> None:
    """Forwards a progress message of a rank to `say`; drops its other output."""
    if line.startswith(_MARK):
        say(line.removeprefix(_MARK))
