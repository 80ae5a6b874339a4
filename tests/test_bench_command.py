"""What `cocodiff bench` and `cocodiff lab` accept, refuse and leave behind."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cocodiff_compile.bench.cases import Case, Grid, Workload
from cocodiff_compile.bench.command import find_cases
from cocodiff_compile.bench.results import Report
from cocodiff_compile.bench.run import run_case
from cocodiff_compile.bench.table import format_report
from cocodiff_compile.cli import _parser, main
from cocodiff_compile.lab.cluster import remove_cluster
from tests.emulated import NAME, eventually, needs_emulation, our_namespaces

TINY = Workload("flux", num_layers=1, num_single_layers=1, heads=4, head_size=16, image_tokens=64)


def _parsed(*arguments: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", *arguments])


def test_quick_is_what_it_says() -> None:
    cases = find_cases(_parsed("--quick"))
    assert [case.title for case in cases] == ["flux-short fp32 2x1", "flux-short fp32 2x2"]
    assert {case.shares for case in cases} == {(50, 75)}
    assert {case.ways for case in cases} == {("inductor", "cache-dit", "cocodiff")}
    assert min(case.repeats for case in cases) >= 8


def test_all_is_every_model_type_grid_and_share() -> None:
    cases = find_cases(_parsed())
    assert len(cases) == len(set(cases)) == 4 * 2 * 3
    assert {case.shares for case in cases} == {(30, 50, 75, 90)}


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
        (["--shares", "100"], "--shares 100; allowed: numbers from 1 to 99"),
        (["--rates", "fast"], "--rates fast; allowed: numbers"),
        (["--ways", "cocodiff"], "--ways must hold 'inductor'"),
        (["--repeats", "3"], "--repeats 3; allowed: from 8"),
        (["--compare", "no.json", "no.json"], "no.json cannot be read"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root it refuses for that reason")
    assert main(["bench", "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_only_results_can_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"schema": 99}')
    assert main(["bench", "--compare", str(file), str(file)]) == 2
    assert "is no result of this version" in capsys.readouterr().err


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
def test_a_case_is_measured_with_its_limit_and_its_bytes() -> None:
    said: list[str] = []
    case = Case(TINY, Grid(2, 1), ("eager", "inductor", "cocodiff-phases"), (), (50.0,))
    result = run_case(case, said.append)
    assert "failure" not in result, result
    (point,) = Report({"results": [result], "machine": {}}).points
    assert [len(way.samples_s) for way in point.ready] == [8, 8, 8]
    assert point.wire_s > 0
    assert 0 < point.data["stream_bytes_per_s"] <= 50e6 / 8
    for way in point.ready:
        assert way.counted_to_accounted == pytest.approx(1, abs=0.05)
        assert way.data["difference"] < 1e-3
    # Two attentions exchange q, k, v, o, half of it with the other node; one gather at the end.
    exchange = (64 + 128) // 2 * 4 * 16 * 4 // 2
    assert point.data["flat_bytes"] == 8 * exchange + 64 // 2 * 16 * 4
    assert any("round 8 of 8" in line for line in said)
    assert "limit" in format_report(Report({"results": [result], "machine": {}}))
    assert not list(our_namespaces(f"bench{os.getpid()}"))


@needs_emulation
@pytest.mark.gloo
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_killed_half_way_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "cocodiff_compile.cli", "bench", "--quick", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    name = f"bench{bench.pid}"
    eventually(lambda: len(_processes_on(name)) >= 4)  # torchrun and a rank on both nodes
    inside = _processes_on(name)
    bench.send_signal(how)
    bench.wait(timeout=60)
    eventually(lambda: our_namespaces(name) == [])
    eventually(lambda: not any(Path(f"/proc/{process}").exists() for process in inside))


def _processes_on(name: str) -> list[str]:
    found: list[str] = []
    for space in our_namespaces(name):
        shown = subprocess.run(
            ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
        )
        found += shown.stdout.split()
    return found
