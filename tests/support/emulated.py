# SPDX-License-Identifier: Apache-2.0
"""Helpers that tests of the emulated cluster share."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

NAME = f"test{os.getpid()}"

needs_emulation = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="an emulated cluster takes root, ip and tc (Debian: iproute2)",
)


def our_namespaces(name: str = NAME) -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in shown.stdout.splitlines()]
    return [space for space in names if space.startswith(f"cocodiff-{name}-")]


def listen_to_interrupts() -> None:
    """Lets SIGINT end a child: a shell's background job, and all it starts, would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until `holds`; fails if it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
