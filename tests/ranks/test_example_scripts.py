# SPDX-License-Identifier: Apache-2.0
"""The example scripts run on two real ranks, agree, and draw what the uncompiled model draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

PIPELINES = {
    ("image.py", "--model", "flux"): 4,
    ("image.py", "--model", "qwen-image"): 2,
    ("image.py", "--model", "sd3"): 2,
    ("video.py",): 2,
    ("controlnet.py",): 6,
    ("lora.py",): 4,
}
"""The least number of attentions that each script must report: Wan's blocks are compiled alone."""


def _run(script: str, *flags: str) -> str:
    """Runs a script of `examples/` with tiny models, and returns what the first rank prints."""
    command = [*TORCHRUN, script, "--tiny", *flags]
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT / "examples",
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ranks agree, bit for bit" in done.stdout
    assert re.search(r"then \d+\.\d+ s per step", done.stdout)
    return done.stdout


def _num_attentions(said: str) -> int:
    return sum(
        map(int, re.findall(r"^(\d+) attentions exchange among 2 ranks", said, re.MULTILINE))
    )


@pytest.mark.gloo
def test_a_model_of_ones_own(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    steps = ("--steps", "3", "--backend", "cocodiff_eager")
    said = _run("own_model.py", *steps, "--out", str(picture))
    assert _num_attentions(said) == 2
    assert "distance from uncompiled: " in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.gloo
def test_a_model_of_ones_own_is_compiled_by_inductor() -> None:
    assert _num_attentions(_run("own_model.py", "--steps", "3")) == 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", PIPELINES, ids=" ".join)
def test_a_pipeline(script: tuple[str, ...], tmp_path: Path) -> None:
    drawn = tmp_path / ("drawn.gif" if script[0] == "video.py" else "drawn.png")
    flags = ("--steps", "2", "--backend", "cocodiff_eager", "--out", str(drawn))
    said = _run(*script, *flags)
    assert _num_attentions(said) >= PIPELINES[script]
    assert "distance from uncompiled: " in said
    assert drawn.stat().st_size > 0
    if script[0] == "lora.py":
        differ = re.search(r"strengths differ by ([\d.]+) of 1", said)
        assert differ
        assert float(differ[1]) > 0.005


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_a_loop_of_ones_own_sends_less() -> None:
    said = _run("own_loop.py", "--steps", "8", "--backend", "cocodiff_eager")
    counts = re.search(r"carried ([\d,]+) bytes, uncompressed ones would carry ([\d,]+)", said)
    assert counts
    sent, full = (int(count.replace(",", "")) for count in counts.groups())
    assert 0 < sent < full / 2
    assert re.search(r"distance from uncompiled: \d\d\.\d dB", said)
