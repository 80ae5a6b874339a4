# SPDX-License-Identifier: Apache-2.0
"""Provides a fake process group of any size in this process, to inspect graphs with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

from cocodiff_compile.compat import fake_store


@contextmanager
def fake_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Joins a fake process group of `num_ranks`; the results of its collectives are meaningless."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
