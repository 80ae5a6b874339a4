# SPDX-License-Identifier: Apache-2.0
"""The examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cocodiff_compile.cli import main
from cocodiff_compile.lab.doctor.examine import AURORA_SETTINGS
from cocodiff_compile.ranks.launch.launchers import adopt_launcher

ROOT = Path(__file__).parents[2]


def test_explain_model() -> None:
    done = subprocess.run(
        [sys.executable, "examples/explain_model.py", "wan", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "blocks.1.attn1" in done.stdout
    assert "2 recognised, 0 declined" in done.stdout


def test_every_example_is_listed() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert {name for name in names if f"[{name}" not in table} == set()


@pytest.mark.parametrize("name", ["two_nodes.yaml", "two_nodes_boxes.json"])
def test_a_machine_as_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", str(ROOT / "examples" / name)]) == 0
    assert "two-nodes" in capsys.readouterr().out


def test_explain_sharing() -> None:
    done = subprocess.run(
        [sys.executable, "examples/explain_sharing.py", "wan", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "shared out, over 4 ranks: " in done.stdout
    assert re.search(r"blocks\.0-1\.attn2 +2 +cross ", done.stdout)


AURORA = ROOT / "examples" / "aurora"
START = """
source examples/aurora/environment.sh
on_tiles cocodiff check
"""


@pytest.mark.parametrize("name", ["environment.sh", "job.sh"])
def test_auroras_scripts_can_be_read(name: str) -> None:
    subprocess.run(["bash", "-n", str(AURORA / name)], check=True)


def test_auroras_ranks_are_told_all_that_pals_leaves_open(tmp_path: Path) -> None:
    """An mpiexec stands in that prints what it is started with."""
    (tmp_path / "mpiexec").write_text('#!/bin/sh\necho "$@"\nenv\n')
    (tmp_path / "mpiexec").chmod(0o755)
    nodes = tmp_path / "nodes"
    nodes.write_text("x1\nx2\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("PATH=/bin:/usr/bin\n")
    environment = {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "1234567.server", "CCL_OP_SYNC": "1"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COCODIFF_VENV": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", START], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    line, *settings = done.stdout.splitlines()
    assert line.startswith("--pmi=pmix -n 24 -ppn 12 --cpu-bind=verbose,list:4-7:")
    assert line.endswith("cocodiff check")
    told = dict(setting.split("=", 1) for setting in settings if "=" in setting)
    assert AURORA_SETTINGS.items() <= told.items()
    assert "CCL_OP_SYNC" not in told
    told |= {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12"}
    launch = adopt_launcher(told)
    assert launch is not None
    assert (launch.rank, launch.num_ranks, launch.local_rank) == (13, 24, 1)
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("x1", "30067")
