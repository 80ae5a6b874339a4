# SPDX-License-Identifier: Apache-2.0
"""Ranks that a real mpiexec started: that of the package `mpich`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cocodiff_compile.ranks.launch.launchers import RANK_VARIABLES

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]

SAY_WHO = """
import json, os, sys
import torch
import torch.distributed as dist
import cocodiff_compile

device = cocodiff_compile.init_distributed()
assert cocodiff_compile.init_distributed() == device, "a group that exists is kept"
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
found = {
    "variables": {name: os.environ[name] for name in names},
    "device": str(device),
    "backend": dist.get_backend(),
    "total": total.item(),
}
open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w").write(json.dumps(found))
dist.destroy_process_group()
"""


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _mpiexec(num_ranks: int, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {
        "MASTER_PORT": _free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
        "COCODIFF_DISABLE": "chunk-heads,chunk-tokens",  # less to compile
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [str(BIN / "mpiexec"), "-n", str(num_ranks), *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gloo
def test_init_distributed_joins_them(tmp_path: Path) -> None:
    _mpiexec(2, sys.executable, "-c", SAY_WHO, str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["variables"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert (found["device"], found["backend"], found["total"]) == ("cpu", "gloo", 1.0)


@pytest.mark.gloo
def test_the_doctor_names_them_once() -> None:
    printed = _mpiexec(2, str(BIN / "cocodiff"), "doctor")
    assert printed.count("MPICH or Intel MPI: rank 0 of 2, local rank 0 of 2") == 1
    assert printed.count("ranks can run here") == 1
    assert "estimated, not measured: local 2" in printed


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_check_runs_on_four(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    arguments = ("--model", "wan", "--steps", "2", "--json", str(file))
    printed = _mpiexec(4, str(BIN / "cocodiff"), "check", *arguments)
    assert "4 ranks started by MPICH or Intel MPI, cpu" in printed
    result = json.loads(file.read_text())
    assert result["ok"] and result["ranks_agree"]
    assert (result["ranks"], result["nodes"]) == (4, 1)
    assert result["sites"] == result["expected_sites"] == 2
