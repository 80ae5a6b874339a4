# SPDX-License-Identifier: Apache-2.0
"""run_local_ranks: results by rank, and no hang whatever a rank does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from cocodiff_compile.lab.local_ranks import RankFailedError, run_local_ranks, tell_parent

pytestmark = pytest.mark.gloo


def _place(rank: int, _num_ranks: int, word: str) -> dict[str, Any]:
    tell_parent(f"{word} {rank}")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return {"ranks": dist.get_world_size(), **{name: os.environ[name] for name in names}}


def test_ranks_know_their_emulated_node() -> None:
    said: list[tuple[int, str]] = []
    results = run_local_ranks(
        _place,
        4,
        "here is",
        timeout_s=120,
        ranks_per_node=2,
        on_message=lambda rank, text: said.append((rank, text)),
    )
    assert [result["GROUP_RANK"] for result in results] == ["0", "0", "1", "1"]
    assert [result["LOCAL_RANK"] for result in results] == ["0", "1", "0", "1"]
    assert all(result["ranks"] == 4 and result["WORLD_SIZE"] == "4" for result in results)
    assert sorted(said) == [(rank, f"here is {rank}") for rank in range(4)]


def _fail_on_rank_1(rank: int, _num_ranks: int) -> int:
    if rank == 1:
        raise ValueError("as asked")
    dist.barrier()
    return rank


def test_a_rank_that_raises_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 failed:(.|\n)*ValueError: as asked"):
        run_local_ranks(_fail_on_rank_1, 2, timeout_s=60)


def _die_on_rank_1(rank: int, _num_ranks: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_rank_that_dies_ends_all() -> None:
    with pytest.raises(RankFailedError, match="rank 1 died with exit code -9"):
        run_local_ranks(_die_on_rank_1, 2, timeout_s=60)


def _sleep(_rank: int, _num_ranks: int) -> None:
    time.sleep(600)


def test_ranks_that_do_not_finish_are_ended() -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[0, 1\] did not finish in time"):
        run_local_ranks(_sleep, 2, timeout_s=8)


# A parent that is killed


def _say_and_sleep(rank: int, num_ranks: int) -> None:
    tell_parent("up")
    _sleep(rank, num_ranks)


PARENT = """
from cocodiff_compile.lab.local_ranks import run_local_ranks
from tests.ranks.test_local_ranks import _say_and_sleep
say = lambda rank, text: print(text, rank, flush=True)
run_local_ranks(_say_and_sleep, 2, timeout_s=300, on_message=say)
"""


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _ranks_of(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in map(int, children)}
    return [pid for pid, command in commands.items() if b"spawn_main" in command]


def _until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("are_up", [True, False], ids=["ranks at work", "ranks still importing"])
def test_ranks_end_with_a_parent_that_is_killed(are_up: bool) -> None:
    ranks: list[int] = []
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert _until(lambda: len(_ranks_of(parent.pid)) == 2, 60)
            ranks = _ranks_of(parent.pid)
            if are_up:
                assert parent.stdout is not None
                assert sorted(parent.stdout.readline() for _ in ranks) == ["up 0\n", "up 1\n"]
            else:
                time.sleep(1)
            parent.kill()
            parent.wait()
            assert _until(lambda: not any(map(_is_alive, ranks)), 60)
        finally:
            parent.kill()
            for pid in filter(_is_alive, ranks):
                os.kill(pid, signal.SIGKILL)
