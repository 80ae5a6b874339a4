"""The world of ranks, and what this process remembers of it for as long as it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")


def ranks_are_real() -> bool:
    """Whether there are other processes to agree with."""
    return dist.is_initialized() and dist.get_backend() != "fake" and dist.get_world_size() > 1


class PerWorld(Generic[T]):
    """One value per world, new in a new world; it goes with the world or when it is forgotten."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    def get(self) -> T:
        world = dist.group.WORLD
        assert world is not None, "asked for by ranks of a process group"
        if world not in self._values:
            self._values[world] = self._new()
        return self._values[world]

    def forget(self) -> None:
        self._values.pop(dist.group.WORLD, None)
