# SPDX-License-Identifier: Apache-2.0
"""Ranks have different hash seeds: neither decisions nor graphs may depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANDOM_MODEL = 4
"""Grouped queries, views between, an MLP; all passes rewrite it."""
_SCRIPT = """
import sys
from pathlib import Path

import torch

import cocodiff_compile
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from tests.dumped_graphs import FORCED, machine_options, plain
from tests.support.random_dits import RandomDit

folder = Path(sys.argv[1])
model = RandomDit(int(sys.argv[2])).eval()
with fake_ranks(4):
    options = {**machine_options(4), **FORCED, "debug_dir": folder}
    (graph,) = cocodiff_compile.explain(model, *model.arguments(), options=options).graphs
print(graph.report.fingerprint)
print(graph.report.decision)
for dump in sorted(folder.rglob("*.py")):
    print(dump.name, plain(dump.read_text()))
"""


def _printed(hash_seed: int, folder: Path) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", _SCRIPT, str(folder), str(RANDOM_MODEL)]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_another_hash_seed_leaves_the_same_graph(tmp_path: Path) -> None:
    first, second = (_printed(seed, tmp_path / str(seed)) for seed in (1, 2))
    assert "head chunks: 2 (for" in first
    assert first.count("all_to_all_single") > 16
    assert first == second
