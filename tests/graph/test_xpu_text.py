# SPDX-License-Identifier: Apache-2.0
"""The order of launches in the text that Inductor writes for an XPU: text only, never compiled or
run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cocodiff_compile.compiler.generated_order import code_kinds, keeps_order
from tests.support.slow_links import slow_links

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.xpu._is_compiled(), reason="torch has XPU: see test_on_device.py")
def test_the_text_keeps_the_order_of_the_graph(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.xpu_text", slow_links(tmp_path / "slow.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    code, kinds = found["code"], found["kinds"]
    assert "@triton.jit" in code and "empty_strided_xpu(" in code
    sent = ["all_to_all_single"] * 2
    assert kinds[:4] == ["matmul", *sent, "matmul"], "both chunks of V, before Q is projected"
    assert kinds.count("all_to_all_single") == 8
    assert code_kinds(code).count("matmul") == kinds.count("matmul")
    assert keeps_order(code, kinds) is True
