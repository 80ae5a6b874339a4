# SPDX-License-Identifier: Apache-2.0
"""`cocodiff demo`: what it draws, prints and writes, and when it says that pictures are off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cocodiff_compile.cli import main
from cocodiff_compile.lab.demo.one_process import OneProcess
from cocodiff_compile.lab.demo.outcome import Outcome
from cocodiff_compile.lab.quality.settings import EXACT, PASSES, QualitySettings

TRUTH = torch.linspace(-1, 1, 2 * 3 * 24 * 24).reshape(2, 3, 24, 24)


def _variant(name: str, off_by: float, seconds: float, counted: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "pictures": TRUTH + off_by,
        "seconds": [seconds],
        "counted_bytes": [counted] if counted else [],
    }


def _outcome(exact_off: float = 1e-6, lossy_off: float = 2e-2, counted: int = 0) -> Outcome:
    settings = QualitySettings((PASSES, "int3"), pictures=2, steps=4, batch=2)
    variants = [
        _variant(EXACT, 1e-6, 4.0, counted),
        _variant(PASSES, exact_off, 2.0, counted),
        _variant("int3", lossy_off, 1.0, counted // 8),
    ]
    result = {"settings": settings.to_json(), "ranks": 2, "rate_mbit": 100.0, "variants": variants}
    return Outcome(OneProcess(TRUTH, 0.5), result)


def test_rows_compare_steps_bytes_and_pictures() -> None:
    one, stock, exact, lossy = _outcome(counted=8000).rows
    assert (one.step_s, one.speedup, one.bytes_per_step) == (0.5, None, None)
    assert (stock.speedup, exact.speedup, lossy.speedup) == (1.0, 2.0, 4.0)
    assert (exact.bytes_per_step, lossy.bytes_per_step) == (2000, 250)
    assert lossy.least_db == pytest.approx(40.0, abs=0.1)
    assert exact.least_db > 100


def test_the_table_says_what_was_measured_where() -> None:
    text = _outcome().format()
    for words in ("2 pictures of 4 steps", "emulated link of 100 Mbit/s", "2.00x", "40.0 dB"):
        assert words in text
    assert "verdict: ok" in text


@pytest.mark.parametrize(
    ("exact_off", "words"), [(1e-6, "the same bits"), (2e-6, "NOT the same bits")]
)
def test_the_table_says_whether_exact_passes_keep_the_bits_of_stock_inductor(
    exact_off: float, words: str
) -> None:
    assert f"exact and stock Inductor: {words}" in _outcome(exact_off).format()


@pytest.mark.parametrize(
    ("exact_off", "lossy_off", "near"),
    [(1e-6, 2e-2, True), (1e-2, 2e-2, False), (1e-6, 0.2, False)],
)
def test_pictures_that_are_off_are_said_to_be(
    exact_off: float, lossy_off: float, near: bool
) -> None:
    outcome = _outcome(exact_off, lossy_off)
    assert outcome.is_near_enough is near
    assert ("NOT ok" in outcome.format()) is not near


@pytest.mark.parametrize("argument", ["--steps", "--batch", "--rounds"])
def test_none_of_something_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--loopback", argument, "0"]) == 2
    assert "allowed: 1 or more" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_draws_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps of two pictures over loopback; few steps lose more, which the verdict says."""
    given = ["--loopback", "--steps", "3", "--batch", "2", "--rounds", "1"]
    status = main(["demo", *given, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text())
    assert [row[""] for row in data["table"]] == [
        "one process, eager",
        "2 ranks, stock Inductor",
        "2 ranks, cocodiff, exact",
        "2 ranks, cocodiff, V-Major (int3from8)",
    ]
    assert (status == 0) == ("verdict: ok" in printed)
    exact, lossy = data["variants"][1:]
    assert min(item["psnr_db"] or 999 for item in exact["distances"]) > 60
    assert lossy["sent_bytes"] < lossy["full_bytes"] / 3
    assert "loopback, where nothing is gained: asked for" in printed
    for name in ("pictures.png", "timeline.svg", "timeline.json", "index.html"):
        assert (tmp_path / name).stat().st_size > 1000
    kept = sorted(file.name for file in (tmp_path / "decisions").iterdir())
    assert kept == ["int3from8_batch_2_loopback.json", "passes_batch_2_loopback.json"]
