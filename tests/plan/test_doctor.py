# SPDX-License-Identifier: Apache-2.0
"""`cocodiff doctor`: here, beside packages that do not fit, and of machines that are not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cocodiff_compile.cli import main
from cocodiff_compile.compat import TESTED_TORCH
from cocodiff_compile.devices.installed import Installed
from cocodiff_compile.lab.doctor.examine import Host, examine
from cocodiff_compile.ranks.launch.launchers import RANK_VARIABLES
from tests.plan.test_choose import IPEX, ONECCL, put_package
from tests.plan.test_launchers import MPICH, PALS, TORCHRUN


def _findings(installed: Installed, **environment: str) -> dict[str, tuple[str, str]]:
    found = examine(Host(installed, environment))
    return {finding.what: (finding.status, finding.text) for finding in found}


def _xpu(**more: Any) -> Installed:
    given = {"device_counts": {"xpu": 12}, "built_in": frozenset({"gloo", "xccl"}), **more}
    return Installed(TESTED_TORCH[0], **given)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "CCL_OP_SYNC", "COCODIFF_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)


def _run(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status = main(["doctor", "--json"])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["ok"] == (status == 0)
    said["by what"] = {item["what"]: item for item in said["findings"]}
    return said


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without accelerator")
def test_here(capsys: pytest.CaptureFixture[str]) -> None:
    said = _run(capsys)
    found = said["by what"]
    assert said["ok"]
    assert found["torch"]["text"] == f"{torch.__version__}, a version tested"
    assert found["device"]["text"] == "cpu, no cuda device, no xpu device"
    assert found["chosen"]["text"] == "cpu, process group 'gloo'"
    assert found["cpu over gloo"]["text"] == "usable"
    without = f"absent: torch {torch.__version__} is built without it"
    assert found["xpu over xccl"]["text"] == without
    has_nccl = torch.distributed.is_nccl_available()
    assert found["cuda over nccl"]["text"] == ("usable" if has_nccl else without)
    assert found["xpu over ccl"]["text"] == "absent: oneccl-bind-pt is not installed"
    assert found["launcher"]["text"].startswith("none: start ranks with")
    assert found["topology"]["text"] == "one rank, nothing to exchange"
    assert "never been run" in found["untested"]["text"]
    assert {item["status"] for item in said["findings"]} <= {"ok", "note"}


@pytest.mark.usefixtures("alone")
def test_it_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "ranks can run here"


def test_an_ipex_that_does_not_fit_is_warned_of_and_not_imported(tmp_path: Path) -> None:
    put_package(tmp_path, IPEX, "2.8.0")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from cocodiff_compile.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
    said = " ".join(done.stdout.split())
    assert "legacy warning: intel-extension-for-pytorch 2.8.0 is made for torch 2.8" in said
    assert "pip uninstall intel-extension-for-pytorch" in said


@pytest.mark.parametrize(
    ("variables", "what", "status", "words"),
    [
        ({"CCL_OP_SYNC": "1"}, "overlap", "warning", "on xpu, CCL_OP_SYNC=1 makes every exchange"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "overlap", "warning", "on cuda, CUDA_LAUNCH_BLOCKING=1"),
        ({"ZE_AFFINITY_MASK": "0.1"}, "settings", "ok", "ZE_AFFINITY_MASK=0.1"),
        ({"FI_PROVIDER": "tcp"}, "settings", "ok", "FI_PROVIDER=tcp"),
        (MPICH, "launcher", "problem", "set MASTER_ADDR"),
        (PALS, "launcher", "problem", "export WORLD_SIZE"),
        (TORCHRUN | {"MASTER_ADDR": "n1"}, "launcher", "ok", "torchrun: rank 3 of 4, local rank 1"),
        (TORCHRUN | {"MASTER_ADDR": "n1"}, "launcher", "ok", "the store is at n1:29500"),
        (TORCHRUN | {"MASTER_ADDR": "n1"}, "topology", "ok", "measured: local 2 x node 2"),
        ({"COCODIFF_TRANSPORT": "xccl"}, "chosen", "problem", "'xccl' on cpu; allowed: gloo"),
    ],
)
def test_what_the_environment_says(
    variables: dict[str, str], what: str, status: str, words: str
) -> None:
    found = _findings(Installed(TESTED_TORCH[0]), **variables)[what]
    assert found[0] == status
    assert words in found[1]


@pytest.mark.parametrize(
    ("installed", "what", "status", "words"),
    [
        (_xpu(), "chosen", "ok", "xpu, process group 'cpu:gloo,xpu:xccl'"),
        (_xpu(), "device", "ok", "12 xpu, no cuda device"),
        (_xpu(), "triton", "problem", "not installed, Inductor needs it"),
        (_xpu(), "topology", "ok", "gpu"),
        (_xpu(), "untested", "note", "xpu: exactness, order and speed are untested"),
        (_xpu(), "Aurora wants", "note", "CCL_PROCESS_LAUNCHER=pmix"),
        (_xpu(), "xpu over gloo", "ok", "only on request: it takes no XPU tensors"),
        (_xpu(built_in=frozenset({"gloo"})), "chosen", "problem", "install a torch for XPU"),
        (_xpu(packages={ONECCL: "2.8.0"}), "legacy", "warning", "oneccl-bind-pt 2.8.0 is made for"),
        (_xpu(packages={ONECCL: TESTED_TORCH[0]}), "legacy", "ok", "fits this torch"),
        (
            Installed("2.10.0a0+git1"),
            "torch",
            "note",
            f"never tested; tested: {', '.join(TESTED_TORCH)}",
        ),
        (Installed(f"{TESTED_TORCH[-1]}+cpu"), "torch", "ok", "a version tested"),
        (Installed("2.13.01"), "torch", "note", "never tested"),
    ],
)
def test_what_is_installed(installed: Installed, what: str, status: str, words: str) -> None:
    found = _findings(installed)[what]
    assert found[0] == status
    assert words in found[1]


def test_more_ranks_than_devices_are_a_problem() -> None:
    many = TORCHRUN | {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "12", "MASTER_ADDR": "n1"}
    for count, status in ((12, "ok"), (6, "problem")):
        found = _findings(_xpu(device_counts={"xpu": count}), **many)["launcher"]
        assert found[0] == status
    assert "local rank 7 has no xpu device of its own: 6 are visible" in found[1]
    assert "ZE_FLAT_DEVICE_HIERARCHY=FLAT" in found[1]


@pytest.mark.parametrize(
    ("device", "code", "status", "words"),
    [
        ("xpu", "backends = {'intel': 1}", "ok", "for intel"),
        ("xpu", "backends = {'nvidia': 1, 'amd': 1}", "problem", "for amd, nvidia, not for intel"),
        ("cuda", "backends = {'intel': 1}", "problem", "for intel, not for nvidia"),
        ("xpu", "backends = {}", "problem", "for nothing, not for intel"),
        ("xpu", "raise AttributeError('old')", "problem", "imported: AttributeError('old')"),
        ("cpu", "backends = {'nvidia': 1}", "ok", "for nvidia"),
    ],
)
def test_the_flavour_of_triton(
    device: str,
    code: str,
    status: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    (tmp_path / "triton" / "backends.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    counts = {} if device == "cpu" else {device: 2}
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
        found = _findings(Installed(TESTED_TORCH[0], counts))["triton"]
    assert found[0] == status
    assert words in found[1]
