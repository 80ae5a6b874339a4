# SPDX-License-Identifier: Apache-2.0
"""Calls of graphs that communicate over several groups: all ranks of a grid choose alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import distributed as dist

from cocodiff_compile.errors import PeerError
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.v_major.denoising import denoising
from tests.support.counted_calls import Compiled, Listening, kinds

GRID = ([0, 1], [2, 3]), ([0, 2], [1, 3])
"""The ranks of each group, by axis."""


def _own_groups(rank: int) -> tuple[str, ...]:
    made = [[(ranks, dist.new_group(ranks)) for ranks in axis] for axis in GRID]
    return tuple(group.group_name for axis in made for ranks, group in axis if rank in ranks)


def _rank(rank: int, _num_ranks: int) -> dict[str, Any]:
    policy = Listening()
    compiled = Compiled(
        policy, drift=float(2**rank), worst=float(3**rank), groups=_own_groups(rank)
    )
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
        compiled.worst = float("nan") if rank == 1 else 0.0
        kinds(compiled, run, 2)
        if rank == 3:
            run.step()
        try:
            compiled()
            error = ""
        except PeerError as found:
            error = str(found)
    heard = [(item.drift, item.worst) for item in policy.heard]
    return {"heard": heard, "error": error}


@pytest.mark.timeout(300)
def test_ranks_that_share_no_group_hear_the_same_and_fail_together() -> None:
    results = run_local_ranks(_rank, 4, timeout_s=250)
    mean = (1 + 2 + 4 + 8) / 4
    assert all(item["heard"][:2] == [(None, 0.0), (mean, 27.0)] for item in results)
    assert all(math.isnan(item["heard"][2][1]) for item in results), "unknown to one, and so to all"
    assert all("ranks disagree about the denoising step" in item["error"] for item in results)
    assert all("another of its groups" in item["error"] for item in results[:2])
