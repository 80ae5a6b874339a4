# SPDX-License-Identifier: Apache-2.0
"""Reports the progress of long work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
"""Receives progress messages, one line each."""
_REPEAT_S = 15.0
"""The time after which the last message is repeated."""
_MARK = "@ "
"""The prefix of a progress message in the output of a rank."""


def timed_sayer() -> Say:
    """Returns a function that prints lines with the seconds since now."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    return say


@contextmanager
def while_waiting(say: Say) -> Iterator[Say]:
    """Yields a function that passes messages to `say`. While none comes, the last one is repeated
    every 15 seconds: people see what is being waited for.
    """
    heard, ended = threading.Event(), threading.Event()
    last = ["the ranks start"]

    def pass_message(text: str) -> None:
        last[0] = text
        heard.set()
        say(text)

    def repeat() -> None:
        while not ended.is_set():
            if not heard.wait(_REPEAT_S):
                say(f"  still: {last[0]}")
            heard.clear()

    ticker = threading.Thread(target=repeat, daemon=True)
    ticker.start()
    try:
        yield pass_message
    finally:
        ended.set()
        heard.set()
        ticker.join()


def say_from_rank(text: str) -> None:
    """Prints a progress message on the first rank, for `pass_on`."""
    if os.environ["RANK"] == "0":
        print(f"{_MARK}{text}", flush=True)


def pass_on(line: str, say: Say) -> None:
    """Forwards a progress message of a rank to `say`; drops its other output."""
    if line.startswith(_MARK):
        say(line.removeprefix(_MARK))
