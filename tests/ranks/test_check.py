# SPDX-License-Identifier: Apache-2.0
"""`cocodiff check`: what it prints, what it writes, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cocodiff_compile.cli import main
from cocodiff_compile.lab import check
from cocodiff_compile.lab.check import CheckSettings, Denoised


@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_the_check_ends_well_and_writes_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, dumps = tmp_path / "check.json", tmp_path / "dumps"
    arguments = ["check", "--model", "wan", "--steps", "2"]
    assert main([*arguments, "--json", str(file), "--debug-dir", str(dumps)]) == 0
    result = json.loads(file.read_text())
    assert result["ok"]
    assert result["sites"] == result["expected_sites"] == 2
    assert result["exchanges_per_step"] >= 8  # more in chunks and runs, where these pay here
    assert result["ranks_agree"]
    assert result["largest_difference"] <= check.LARGEST_DIFFERENCE
    printed = capsys.readouterr().out
    assert "step 2/2" in printed, "progress"
    assert "2 emulated nodes x 2 tiles" in printed
    assert "2 of 2 Ulysses attentions" in printed
    assert sorted(folder.name for folder in dumps.iterdir()) == [f"rank_00{r}" for r in range(4)]


def _rank(latents: torch.Tensor, sites: int = 1) -> dict[str, object]:
    site = {"num_exchanges": 4, "bytes": 64}
    graph = {"sites": [site] * sites, "declined": []}
    return {"denoised": Denoised(latents, [1.0]), "graphs": [graph], "expected_sites": 1}


@pytest.mark.parametrize(
    ("ranks", "ok"),
    [
        ([_rank(torch.zeros(2)), _rank(torch.zeros(2))], True),
        ([_rank(torch.zeros(2)), _rank(torch.tensor([0.0, 1e-6]))], False),
        ([_rank(torch.ones(2)), _rank(torch.ones(2))], False),
        ([_rank(torch.zeros(2), sites=0), _rank(torch.zeros(2), sites=0)], False),
    ],
    ids=["all well", "ranks disagree", "far from eager", "a site was missed"],
)
def test_the_verdict(ranks: list[dict[str, object]], ok: bool) -> None:
    result = check._compare(CheckSettings(), Denoised(torch.zeros(2), [1.0]), ranks, num_nodes=1)
    assert result["ok"] == ok


@pytest.mark.parametrize("arguments", [["--model", "unet"], ["--steps", "0"], ["--bad"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "nofolder/x.json"], "there is no folder"),
        (["--steps", "x"], "'x' is not a whole number from 1"),
        (["--steps", "-1"], "'-1' is not a whole number from 1"),
        (["--steps", "1.5"], "'1.5' is not a whole number from 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "run_check", lambda *_args: pytest.fail("the check ran"))
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
