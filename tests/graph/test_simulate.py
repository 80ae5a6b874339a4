# SPDX-License-Identifier: Apache-2.0
"""`cocodiff simulate`: real graphs of published shapes, cut to few blocks, on any machine."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cocodiff_compile.cli import main
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.simulate.capture import padded_to
from cocodiff_compile.lab.simulate.command import parse_nodes
from cocodiff_compile.lab.simulate.microbenchmark import reproduce
from cocodiff_compile.lab.simulate.plot import check_plot, plot_simulation
from cocodiff_compile.lab.simulate.public_shapes import PUBLIC_SHAPES, check_resolution, find_shape
from cocodiff_compile.lab.simulate.published import published_figure
from cocodiff_compile.lab.simulate.run import Row, SimulateSettings, Simulation, simulate
from cocodiff_compile.lab.simulate.tables import trace_data

LAYERS = 3
OUTPUT_CHANNELS = 2 * 2 * 16
"""What Qwen-Image returns of a token: its pixels of the latents."""


@pytest.fixture(scope="module")
def at_96() -> Simulation:
    """Three blocks of Qwen-Image in one Ulysses group of 96 ranks, in every plan."""
    return simulate(
        SimulateSettings(
            "aurora", (8,), "qwen-image", 768, degree=96, max_layers=LAYERS, all_plans=True
        )
    )


def _row(simulation: Simulation, variant: str) -> Row:
    (row,) = (row for row in simulation.rows if row.variant == variant)
    return row


def test_the_microbenchmark_is_reproduced() -> None:
    figures = reproduce()
    assert len(figures) == 8
    for figure in figures:
        assert abs(figure.deviation) <= 0.15, figure
    assert [figure.published for figure in figures if figure.unit == "x"][2:] == [3.0, 1.0]


def test_messages_are_those_of_the_paper(at_96: Simulation) -> None:
    counts = {row.variant: row.messages_per_exchange for row in at_96.rows}
    assert counts["flat"] == 9120
    assert counts["tapa"] == 4608


def test_each_way_runs_the_phases_it_names(at_96: Simulation) -> None:
    phases = {row.variant: row.phases for row in at_96.rows}
    auto = phases.pop("auto")
    assert phases == {
        "flat": "one phase",
        "tapa": "tile | gpu+node",
        "tile+gpu | node": "tile+gpu | node",
        "tile | gpu | node": "tile | gpu | node",
    }
    assert auto in phases.values()


def test_the_cheapest_plan_is_no_slower_than_any(at_96: Simulation) -> None:
    auto = _row(at_96, "auto").timeline.step_s
    assert auto <= min(row.timeline.step_s for row in at_96.rows) * (1 + 1e-9)


def test_every_block_exchanges_q_k_v_and_o(at_96: Simulation) -> None:
    flat = _row(at_96, "flat")
    assert flat.num_exchanges == 4 * LAYERS
    collectives = [span for span in flat.timeline.spans if span.kind == "exchange"]
    assert len(collectives) == 4 * LAYERS + 1, "and the result is gathered"


def test_bytes_are_those_of_padded_heads(at_96: Simulation) -> None:
    """24 heads run as 96: what a rank sends is a share of tokens x padded heads x head size."""
    shape = find_shape("qwen-image")
    tokens = (shape.num_tokens(768) + shape.text_tokens_for(96)) // 96
    exchanged = 4 * LAYERS * tokens * 96 * shape.head_size * 2
    gathered = shape.num_tokens(768) * OUTPUT_CHANNELS * 2
    sent = sum(use.rank_bytes for use in _row(at_96, "flat").links)
    assert sent == pytest.approx((exchanged + gathered) * 95 / 96)
    assert any("padded to 96" in note for note in at_96.notes)


def test_the_slow_links_carry_the_same_bytes_in_fewer_messages(at_96: Simulation) -> None:
    flat, tapa = (
        {use.link: use for use in _row(at_96, variant).links}["slingshot-11"]
        for variant in ("flat", "tapa")
    )
    assert tapa.rank_bytes == pytest.approx(flat.rank_bytes)
    assert tapa.messages < flat.messages


def test_time_is_computation_and_what_is_exposed(at_96: Simulation) -> None:
    for row in at_96.rows:
        timeline = row.timeline
        assert timeline.step_s == pytest.approx(timeline.compute_s + timeline.exposed_s)
        assert timeline.exposed_s <= timeline.in_flight_s + 1e-9


def test_the_trace_is_what_viewers_read(at_96: Simulation) -> None:
    trace: dict[str, Any] = json.loads(json.dumps(trace_data(at_96)))
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    named = [e for e in events if e["name"] == "thread_name"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    assert len(processes) == len(at_96.rows)
    assert all("simulated" in name for name in processes.values())
    lanes = set(threads.values())
    assert "compute" in lanes
    assert {name.split(" ", 1)[1] for name in lanes - {"compute"}} >= {"tile", "slingshot-11"}
    for thread in threads:
        spans = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread]
        assert spans and all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
        spans.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(spans)), thread


def test_the_picture_shows_every_row(at_96: Simulation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_plot(tmp_path / "bars.svg")
    plot_simulation(at_96, tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert "<!-- ms per step (simulated) -->" in drawn
    for row in at_96.rows:
        assert f"<!-- {row.variant.split(' | ')[0]}" in drawn
        assert f"{row.speedup:.2f}x" in drawn or row.variant == "flat"


def test_the_process_is_left_as_it_was(at_96: Simulation) -> None:  # noqa: ARG001
    assert not torch.distributed.is_initialized()


def test_a_process_with_a_group_of_its_own_is_refused() -> None:
    from cocodiff_compile.ranks.fake_ranks import fake_ranks  # noqa: PLC0415

    with fake_ranks(4), pytest.raises(UserError, match="a process of its own"):
        simulate(SimulateSettings("aurora", (1,), "flux", 768, max_layers=1))


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace")}
    machine = ("--topology", "dgx-h100", "--nodes", "2", "--ulysses-degree", "8")
    model = ("--model", "sd3.5", "--resolution", "1024", "--layers", "1")
    figures = ("--json", str(files["json"]), "--trace", str(files["trace"]))
    status = main(["simulate", *machine, *model, *figures])
    printed = capsys.readouterr()
    assert status == 0
    assert "simulated, nothing was run" in printed.out
    assert "38 heads do not divide; assumed padded to 40" in printed.out
    assert "16 ranks = 2 Ulysses groups of 8" in printed.out
    assert "published" not in printed.out, "another machine"
    assert "1 blocks from 1 graphs" in printed.err, "progress"
    data = json.loads(files["json"].read_text())
    assert data["kind"] == "simulated"
    assert [row["exchanges"] for row in data["rows"]] == ["flat", "auto"]
    flat = data["rows"][0]
    assert (flat["ranks"], flat["ulysses_degree"], flat["messages_per_exchange"]) == (16, 8, 56)
    assert [link["link"] for link in flat["links"]] == ["nvlink"], "a group fills a node"
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_the_microbenchmark_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--microbenchmark"]) == 0
    printed = capsys.readouterr().out
    assert "25.50 ms" in printed
    assert "simulated step" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "unet"], "unknown model 'unet'; known: qwen-image, flux"),
        (["--topology", "moon"], "'moon' is neither a preset"),
        (["--nodes", "1,x"], "--nodes is '1,x'"),
        (["--nodes", ""], "--nodes is ''"),
        (["--nodes", "0"], "--nodes is '0'"),
        (["--resolution", "1000"], "not a multiple of 16"),
        (["--resolution", "1024"], "4096 tokens of qwen-image, which do not divide among 12 ranks"),
        (["--model", "sd3.5", "--resolution", "3840"], "3072 at most"),
        (["--ulysses-degree", "5"], "choose --ulysses-degree from [2, 3, 4, 6, 12]"),
        (["--ulysses-degree", "0"], "--ulysses-degree is 0"),
        (["--layers", "0"], "--layers is 0"),
        (["--device", "abacus"], "unknown device 'abacus'; known: aurora-tile, h100"),
        (["--topology", "flat"], "a single rank"),
        (["--topology", "examples/two_nodes.yaml"], "has 4 ranks (2 tile x 2 node)"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--plot", "x.txt"], "must end in .png, .svg, .pdf"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", "--plot", "x.png"]) == 2
    assert "cocodiff-compile[plots]" in capsys.readouterr().err


def test_nodes_are_read_once_each() -> None:
    assert parse_nodes("1,2,2,8") == (1, 2, 8)


@pytest.mark.parametrize("name", sorted(PUBLIC_SHAPES))
def test_shapes_fit_the_degrees_of_the_paper(name: str) -> None:
    shape = PUBLIC_SHAPES[name]
    for degree in (12, 24, 48):
        for resolution in (768, 1536, 2304):
            check_resolution(shape, resolution, degree)
        assert padded_to(shape.heads, degree) % degree == 0
        assert 0 <= padded_to(shape.heads, degree) - shape.heads < degree


def test_published_figures_stand_beside_their_cases() -> None:
    assert published_figure("qwen-image", 1536, 2, "flat") == "9539 ms, 96 %"
    assert published_figure("sd3.5", 1536, 8, "tapa") == "1.9x TAPA's part"
    assert published_figure("sd3.5", 1536, 4, "auto") == "8.1x whole method"
    assert published_figure("flux", 768, 1, "auto") == "2.5x whole method, mean one node"
    assert published_figure("flux", 768, 3, "auto") == ""
    assert published_figure("wan", 768, 1, "tapa") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLIC_SHAPES))
def test_every_shape_is_captured(name: str) -> None:
    settings = SimulateSettings("aurora", (1,), name, 768, max_layers=2)
    simulation = simulate(settings)
    num_blocks = 2 * len(PUBLIC_SHAPES[name].layers)
    assert _row(simulation, "flat").num_exchanges == 4 * num_blocks
    assert _row(simulation, "flat").messages_per_exchange == 132
    assert _row(simulation, "tapa").messages_per_exchange == 72
