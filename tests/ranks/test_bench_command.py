# SPDX-License-Identifier: Apache-2.0
"""Tests what `cocodiff bench` and `cocodiff lab` accept, refuse and leave behind."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cocodiff_compile.cli import _parser, main
from cocodiff_compile.lab.bench.cases import WORKLOADS, Case, Grid, Workload
from cocodiff_compile.lab.bench.command import find_cases
from cocodiff_compile.lab.bench.results import Report
from cocodiff_compile.lab.bench.run import run_case
from cocodiff_compile.lab.bench.table import format_report
from cocodiff_compile.lab.cluster import CLUSTER_VARIABLE, remove_cluster
from tests.support.emulated import (
    NAME,
    eventually,
    listen_to_interrupts,
    needs_emulation,
    our_namespaces,
)

TINY = Workload("flux", num_layers=1, num_single_layers=1, heads=4, head_size=16, image_tokens=64)


def _parsed(*arguments: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", *arguments])


def test_quick_is_what_it_says() -> None:
    cases = find_cases(_parsed("--quick"))
    assert [case.title for case in cases] == ["flux-short fp32 2x1", "flux-short fp32 2x2"]
    assert {case.shares for case in cases} == {(55, 75)}
    assert {case.variants for case in cases} == {("inductor", "cache-dit", "cocodiff")}
    assert min(case.repeats for case in cases) >= 8


def test_all_is_every_model_type_grid_and_share() -> None:
    cases = find_cases(_parsed())
    assert len(cases) == len(set(cases)) == 4 * 2 * 3
    assert {case.shares for case in cases} == {(30, 50, 75, 90)}


@pytest.mark.parametrize("grid", ["1x12", "2x12", "2x3"])
def test_ranks_that_somebody_started_can_share_every_workload(grid: str) -> None:
    cases = find_cases(_parsed(), grid)
    assert {str(case.grid) for case in cases} == {grid}
    for case in cases:
        workload = case.workload
        for size in (workload.heads, workload.image_tokens, workload.text_tokens):
            assert size % case.grid.num_ranks == 0
        assert (workload.heads, workload.image_tokens) >= (8, 1024)


def test_the_workload_is_the_one_that_others_figures_are_known_for() -> None:
    (case,) = find_cases(_parsed("--models", "flux", "--dtypes", "fp32", "--grids", "2x1"))
    model = case.workload.build()
    assert len(model.transformer_blocks) == 2
    assert len(model.single_transformer_blocks) == 4
    assert (case.workload.heads, case.workload.head_size) == (8, 64)
    inputs = case.workload.inputs(model)
    assert inputs["hidden_states"].shape[1] == 1024
    assert inputs["encoder_hidden_states"].shape[1] == 128


def test_cases_survive_json() -> None:
    for case in find_cases(_parsed("--rates", "100,200.5")):
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        assert case.rates_mbit == (100.0, 200.5)
        assert case.shares == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "flux,gpt"], "--models gpt; allowed: flux"),
        (["--grids", "2by1"], "grid '2by1'; allowed: NODESxTILES"),
        (["--grids", "0x2"], "allowed: NODESxTILES"),
        (["--grids", "1x2"], "an emulated cluster has 2 nodes or more"),
        (["--shares", "100"], "--shares 100; allowed: numbers from 1 to 99"),
        (["--rates", "fast"], "--rates fast; allowed: numbers"),
        (["--variants", "cocodiff"], "--variants must include 'inductor'"),
        (["--repeats", "3"], "--repeats 3; allowed: 8 or more"),
        (["--compare", "no.json", "no.json"], "no.json cannot be read"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_only_results_can_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"schema": 99}')
    assert main(["bench", "--compare", str(file), str(file)]) == 2
    assert "was not written by this version" in capsys.readouterr().err


@pytest.fixture
def name() -> Iterator[str]:
    yield NAME
    remove_cluster(NAME)


@needs_emulation
def test_up_run_list_down(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text(
        "import os; print('I am', os.environ['RANK'], os.environ['COCODIFF_CLUSTER'])"
    )
    assert main(["lab", "up", "--name", name, "--nodes", "2", "--rate", "50"]) == 0
    assert "node 1  10.77.0.2  50 Mbit/s" in capsys.readouterr().out
    assert main(["lab", "list"]) == 0
    assert f"{name}  2 nodes" in capsys.readouterr().out
    assert main(["lab", "run", "--name", name, "--", str(script)]) == 0
    assert f"[node 1] I am 1 {name}" in capsys.readouterr().out
    assert main(["lab", "down", "--name", name]) == 0
    assert our_namespaces() == []
    assert main(["lab", "down", "--name", name]) == 2
    assert "is not up" in capsys.readouterr().err


@needs_emulation
def test_lab_refuses_with_the_reason(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "run", "--name", name]) == 2
    assert "nothing to run" in capsys.readouterr().err
    assert main(["lab", "run", "--name", name, "--", "x.py"]) == 2
    assert f"cocodiff lab up --name {name}" in capsys.readouterr().err
    assert main(["lab", "up", "--name", name, "--nodes", "0"]) == 2
    assert "0 nodes; allowed" in capsys.readouterr().err


@needs_emulation
@pytest.mark.gloo
@pytest.mark.slow
def test_a_case_is_measured_with_its_limit_and_its_bytes() -> None:
    said: list[str] = []
    variants = ("eager", "inductor", "cocodiff", "cocodiff-phases", "cache-dit")
    case = Case(TINY, Grid(2, 1), variants, (), (50.0,))
    result = run_case(case, said.append)
    assert "failure" not in result, result
    (point,) = Report({"results": [result], "machine": {}}).points
    ready = [variant for variant in point.ready if variant.name != "cache-dit"]
    assert [variant.name for variant in ready] == ["eager", "inductor", "cocodiff"]
    assert [len(variant.samples_s) for variant in ready] == [8, 8, 8]
    assert (
        point.variants[4].reason == "" or "cache-dit is not installed" in point.variants[4].reason
    )
    assert "needs a topology with two axes" in point.variants[3].reason
    assert point.wire_s > 0
    assert all(0 < rate <= 1.05 * 50e6 / 8 for rate in point.data["streams_bytes_per_s"])
    for variant in point.ready:
        assert variant.counted_to_accounted == pytest.approx(1, abs=0.05)
        assert variant.data["difference"] < 1e-3
    # Two attentions exchange q, k, v, o, half of it with the other node; one gather at the end.
    exchange = (64 + 128) // 2 * 4 * 16 * 4 // 2
    assert point.data["flat_bytes"] == 8 * exchange + 64 // 2 * 16 * 4
    assert any("round 8 of 8" in line for line in said)
    assert "limit" in format_report(Report({"results": [result], "machine": {}}))
    assert not list(our_namespaces(f"bench{os.getpid()}"))


_KILLED = [
    (signal.SIGKILL, "case 1 of 2"),
    *((how, "round 1 of 8") for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
]


@needs_emulation
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("how", "when"), _KILLED)
def test_a_killed_benchmark_leaves_nothing(how: int, when: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cocodiff_compile.cli", "bench", "--quick"]
    bench = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,  # noqa: PLW1509
    )
    name = f"bench{bench.pid}"
    try:
        assert bench.stdout is not None
        assert any(when in line for line in bench.stdout)
        eventually(lambda: len(_processes_on(name)) >= 4, 120)  # torchrun and a rank per node
        bench.send_signal(how)
        bench.wait(timeout=60)
        eventually(lambda: our_namespaces(name) == [])
        eventually(lambda: _processes_on(name) == [])
    finally:
        bench.kill()
        bench.wait()


def _processes_on(name: str) -> list[str]:
    """Returns the processes on the cluster's nodes, by the variable that all of them inherit."""
    mark = f"{CLUSTER_VARIABLE}={name}\0".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes():
                found.append(file.parent.name)
    return found


@needs_emulation
@pytest.mark.gloo
@pytest.mark.slow
def test_links_are_set_so_that_communication_has_its_share() -> None:
    case = Case(WORKLOADS["flux-short"], Grid(2, 2), ("inductor", "cocodiff-phases"), (75,))
    (point,) = Report({"results": [run_case(case, print)], "machine": {}}).points
    assert point.share == pytest.approx(0.75, abs=0.15)
    assert [variant.reason for variant in point.variants] == ["", ""]
    assert point.variants[1].data["accounted_bytes"] == point.variants[0].data["accounted_bytes"]


@needs_emulation
@pytest.mark.gloo
@pytest.mark.slow
def test_a_profiled_case_has_a_timeline_per_variant_and_rank() -> None:
    case = Case(TINY, Grid(2, 1), ("inductor", "cocodiff"), (), (50.0,), profiled=True)
    (point,) = Report({"results": [run_case(case, print)], "machine": {}}).points
    assert [(line.variant, line.rank) for line in point.profiled_steps] == [
        ("diffusers + Inductor", 0),
        ("diffusers + Inductor", 1),
        ("cocodiff", 0),
        ("cocodiff", 1),
    ]
    for line in point.profiled_steps:
        spans = line.timeline.spans
        assert sum("all_to_all" in span.name for span in spans if span.kind == "exchange") == 8
        assert any("cpp_fused" in span.name for span in spans)


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_torchrun_started_are_measured_as_they_are(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    bench = ["-m", "cocodiff_compile.cli", "bench", "--models", "flux-short", "--dtypes", "fp32"]
    rest = ["--variants", "inductor,cocodiff", "--shares", "50", "--out", str(tmp_path)]
    done = subprocess.run([*torchrun, *bench, *rest], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--shares ignored" in done.stdout
    (point,) = Report(json.loads((tmp_path / "results.json").read_text())).points
    assert point.case.grid == Grid(1, 2)
    assert point.wire_s == 0
    assert [len(variant.samples_s) for variant in point.ready] == [8, 8]
