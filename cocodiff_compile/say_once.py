# SPDX-License-Identifier: Apache-2.0
"""Logs messages once per process, however many graphs are compiled."""

from __future__ import annotations

import logging

_said: set[str] = set()


def say_once(logger: logging.Logger, level: int, message: str) -> None:
    """Logs `message` the first time that it occurs in this process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def forget_what_was_said() -> None:
    """Lets every message be logged again; for tests."""
    _said.clear()
