# SPDX-License-Identifier: Apache-2.0
"""Provides the store of the world, and values that live as long as the world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from cocodiff_compile.compat import default_store

T = TypeVar("T")

_own = threading.local()


def ranks_are_real() -> bool:
    """Returns whether there are other processes to agree with."""
    return dist.is_initialized() and dist.get_backend() != "fake" and dist.get_world_size() > 1


def world_store() -> Any:
    """Returns the store of the world, over this thread's own connection if it has one."""
    return getattr(_own, "store", None) or default_store()


@contextmanager
def own_connection() -> Iterator[None]:
    """Opens another connection to the store for this thread: a thread that waits in the store
    blocks all others on the same connection.
    """
    _own.store = default_store().clone()
    try:
        yield
    finally:
        del _own.store


class PerWorld(Generic[T]):
    """Holds one value per world, created on first use and dropped with the world or by `clear`."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def get(self) -> T:
        world = dist.group.WORLD
        assert world is not None, "asked for by ranks of a process group"
        if world not in self._values:
            self._values[world] = self._new()
        return self._values[world]

    def clear(self) -> None:
        self._values.pop(dist.group.WORLD, None)
