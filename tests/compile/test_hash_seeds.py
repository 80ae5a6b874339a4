"""Ranks have different hash seeds: neither decisions nor graphs may depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys
from pathlib import Path

import cocodiff_compile
from cocodiff_compile.lab.fake_ranks import fake_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize
from tests.dumped_graphs import FORCED, machine_options, plain

folder = Path(sys.argv[1])
with fake_ranks(4):
    small = SMALL_MODELS["flux"]
    model = small.build(num_layers=1, heads=4, head_size=32)
    inputs = small.inputs(model, image_tokens=128, text_tokens=16)
    parallelize(model)
    options = {**machine_options(4), **FORCED, "debug_dir": folder}
    (graph,) = cocodiff_compile.explain(model, **inputs, options=options).graphs
print(graph.report.fingerprint)
print(graph.report.decision)
for dump in sorted(folder.rglob("*.py")):
    print(dump.name, plain(dump.read_text()))
"""


def _printed(hash_seed: int, folder: Path) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", _SCRIPT, str(folder)]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_another_hash_seed_leaves_the_same_graph(tmp_path: Path) -> None:
    first, second = (_printed(seed, tmp_path / str(seed)) for seed in (1, 2))
    assert "head chunks: 2 (for" in first
    assert first.count("all_to_all_single") > 16
    assert first == second
