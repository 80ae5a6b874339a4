"""The examples run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
