# SPDX-License-Identifier: Apache-2.0
"""Knows which models are being called that gather the shares they return.

`compiler/enclosing_module.py` gives such a model two hooks, which enter and leave here. A call is
known by its frame on the stack: one left without its second hook (by an interrupt, for one)
counts for nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn


class _Calls(threading.local):
    """Holds the calls of one thread."""

    def __init__(self) -> None:
        self.begun = 0
        self.steps = 0
        self.under_way: dict[int, FrameType] = {}
        """The frames of calls that were entered, by identity."""
        self.is_as_in_later_calls = False


_calls = _Calls()


def module_calls() -> Iterator[FrameType]:
    """Yields the frames of the calls of modules on the stack, the innermost first; `self` is the
    module.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame
        frame = frame.f_back


def enter(model: nn.Module) -> None:
    """Begins a call of a model, from within it."""
    _calls.begun += 1
    _calls.steps = 0
    frames = {id(frame): frame for frame in module_calls()}
    for stale in _calls.under_way.keys() - frames.keys():
        del _calls.under_way[stale]
    own = next(frame for frame in frames.values() if frame.f_locals["self"] is model)
    _calls.under_way[id(own)] = own


def leave(model: nn.Module) -> None:
    """Ends the innermost call of a model, from within it; does nothing if it was not entered."""
    own = next((frame for frame in module_calls() if frame.f_locals["self"] is model), None)
    _calls.under_way.pop(id(own), None)


def begun_calls() -> int:
    """Returns how many calls were entered: the same on all ranks that run the same program."""
    return _calls.begun


def next_step() -> int:
    """Numbers what happens to shares in one call of a model, when they are made and when they are
    gathered: the same on all ranks that run the same program.
    """
    _calls.steps += 1
    return _calls.steps


def is_gathered_behind() -> bool:
    """Returns whether a model that is being called gathers the shares that it returns."""
    return _calls.is_as_in_later_calls or any(
        _calls.under_way.get(id(frame)) is frame for frame in module_calls()
    )


@contextmanager
def as_in_later_calls() -> Iterator[None]:
    """A context in which shares are handed on as in every call of a model but its first."""
    before, _calls.is_as_in_later_calls = _calls.is_as_in_later_calls, True
    try:
        yield
    finally:
        _calls.is_as_in_later_calls = before
