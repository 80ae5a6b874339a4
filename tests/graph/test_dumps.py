# SPDX-License-Identifier: Apache-2.0
"""Dumps: a folder per rank and graph whose files run by themselves, and the same in the trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

import cocodiff_compile
from cocodiff_compile.ir.aten import emit
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.pipeline.run_passes import Pipeline, Stage
from cocodiff_compile.report.dumps import FolderDump
from tests.support.captured import capture, fake_ranks
from tests.support.ulysses_block import WIDTH, Block

ROOT = Path(__file__).parents[2]


def _x() -> torch.Tensor:
    return torch.randn(1, 4, WIDTH)


def _run(file: Path) -> str:
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_a_dump_is_there_and_runs(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with fake_ranks(4, rank=1):
        options = {"debug_dir": tmp_path, "topology": "aurora", "tapa": "on"}
        cocodiff_compile.explain(Block().eval(), _x(), options=options)
    (folder,) = (tmp_path / "rank_001").glob("graph_*")
    assert sorted(file.name for file in folder.iterdir()) == [
        "00_captured.py",
        "01_recognize-ulysses.diff",
        "01_recognize-ulysses.py",
        "02_split-projections.diff",
        "02_split-projections.py",
        "03_chunk-heads.diff",
        "03_chunk-heads.py",
        "04_chunk-tokens.diff",
        "04_chunk-tokens.py",
        "05_split-tapa-phases.diff",
        "05_split-tapa-phases.py",
        "06_schedule-v-first.diff",
        "06_schedule-v-first.py",
        "explanation.json",
        "explanation.txt",
        "op_counts.txt",
    ]
    assert (folder / "01_recognize-ulysses.diff").read_text() == "", "nothing was rewritten"
    assert "_c10d_functional.all_to_all_single.default 4" in (folder / "op_counts.txt").read_text()
    assert len(json.loads((folder / "explanation.json").read_text())["sites"]) == 1
    assert f"(1, 4, {WIDTH})" in _run(folder / "00_captured.py")
    assert f"(1, 4, {WIDTH})" in _run(folder / "06_schedule-v-first.py")


@pytest.mark.parametrize("name", ["flux", pytest.param("z-image", marks=pytest.mark.slow)])
def test_the_dump_of_a_public_model_over_a_part_of_the_world_runs(
    tmp_path: Path, name: str
) -> None:
    """Other groups than the world, complex constants, masks."""
    small = SMALL_MODELS[name]
    torch._dynamo.reset()
    with fake_ranks(4, rank=3):
        model = small.build(num_layers=1)
        inputs = small.inputs(model)
        options = {"shard": {"min_gain": 0, "degree": 2}, "debug_dir": tmp_path}
        cocodiff_compile.explain(model, **inputs, options=options)
    (folder,) = (tmp_path / "rank_003").glob("graph_*")
    assert _run(folder / "01_shard-tokens.py").strip()


def test_a_dump_with_symbolic_sizes_runs(tmp_path: Path) -> None:
    torch._dynamo.reset()
    x = _x()
    torch._dynamo.mark_dynamic(x, 1)
    with fake_ranks(2):
        cocodiff_compile.explain(Block().eval(), x, options={"debug_dir": tmp_path})
    (folder,) = (tmp_path / "rank_000").glob("graph_*")
    assert f"(1, 4, {WIDTH})" in _run(folder / "00_captured.py")


def test_the_environment_variable_asks_for_dumps_of_a_real_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("COCODIFF_DEBUG_DIR", str(tmp_path))
    with fake_ranks(2), torch.no_grad():
        torch.compile(Block().eval(), backend="cocodiff")(_x())
    assert len(list(tmp_path.glob("rank_000/graph_*/00_captured.py"))) == 1


class _NegateTheResult:
    """A pass that changes one thing."""

    name = "negate-the-result"

    def run(self, graph: Graph, _recognition: Recognition) -> PassResult:
        output = graph.output_node()
        (result,) = output.args[0]  # type: ignore[misc]
        with graph.inserting_before(output):
            negated = emit(graph, torch.ops.aten.neg.default, result, like=result)
        output.args = ((negated,),)
        return PassResult(changed=True)


def test_a_diff_shows_what_a_pass_changed(tmp_path: Path) -> None:
    with fake_ranks(2):
        (gm,) = capture(Block().eval(), _x())
        dump = FolderDump(tmp_path / "graph", rank=0, graph_index=0)
        Pipeline((Stage.of(_NegateTheResult()),), (dump,)).run(GraphModule(gm, gm.graph))
    diff = (tmp_path / "graph" / "01_negate-the-result.diff").read_text()
    added = [line for line in diff.splitlines() if line.startswith("+ ")]
    assert any("aten.neg.default" in line for line in added)
    counts = (tmp_path / "graph" / "op_counts.txt").read_text().splitlines()
    assert "aten.neg.default 1" not in counts[0]
    assert "aten.neg.default 1" in counts[1]


TRACED = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.support.ulysses_block import Block, WIDTH
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
with torch.no_grad():
    torch.compile(Block().eval(), backend="cocodiff")(torch.randn(1, 4, WIDTH))
"""


def test_torch_trace_and_torch_logs_show_every_stage(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCH_TRACE": str(tmp_path),
        "TORCH_LOGS": "+cocodiff_compile",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRACED],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trace = "".join(file.read_text() for file in tmp_path.iterdir())
    for name in ("cocodiff_00_captured", "cocodiff_01_recognize-ulysses", "cocodiff_explanation"):
        assert f'"name": "{name}"' in trace
    assert "1 recognised, 0 declined" in done.stderr, "TORCH_LOGS shows the table"
    assert "recognize-ulysses took" in done.stderr, "+ shows debug messages"
