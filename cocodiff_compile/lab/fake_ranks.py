"""A process group of any size in this process, to look at graphs with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

from cocodiff_compile.compat import fake_store


@contextmanager
def fake_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group of `num_ranks` in this process; what its collectives return is junk."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
