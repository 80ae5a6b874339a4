# SPDX-License-Identifier: Apache-2.0
"""The small trained model and the measures: pictures, tokens, distances, policies by name."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cocodiff_compile.cli import main
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.quality.command import _write, format_quality, saved
from cocodiff_compile.lab.quality.pictures import (
    COLOURS,
    NUM_WORDS,
    SIDE,
    VOCABULARY,
    draw_pictures,
    random_prompts,
)
from cocodiff_compile.lab.quality.plot import plot_frontier, plot_pictures
from cocodiff_compile.lab.quality.ranks import distances
from cocodiff_compile.lab.quality.settings import POLICIES, QualitySettings, v_major_of
from cocodiff_compile.lab.quality.small_dit import (
    NUM_NAMES,
    Sampling,
    conditioning,
    load_small_dit,
    sample_pictures,
    to_pictures,
    to_tokens,
)
from cocodiff_compile.v_major.delta_code import FULL
from cocodiff_compile.v_major.options import VMajorOptions
from cocodiff_compile.v_major.payload import Payload
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Paper, Policy


def test_a_picture_shows_what_its_words_say() -> None:
    ground, disc, square, red, white, middle, corner = 0, 0, 1, 0, 6, 4, 0
    prompt = torch.tensor([[ground, disc, red, middle, square, white, corner, 1]])
    (picture,) = draw_pictures(prompt)
    assert torch.allclose(picture[:, SIDE // 2, SIDE // 2], COLOURS[red], atol=0.05)
    place = round((1 - 0.55) / 2 * (SIDE - 1))
    assert torch.allclose(picture[:, place, place], COLOURS[white], atol=0.1)
    assert torch.all(picture[:, -1, 0] < 0)  # the dark ground


def test_tokens_are_pictures_and_back() -> None:
    pictures = torch.randn(3, 3, SIDE, SIDE)
    assert torch.equal(to_pictures(to_tokens(pictures)), pictures)


def test_every_word_has_a_name_of_its_own() -> None:
    prompts = torch.tensor([[0] * NUM_WORDS, [size - 1 for size in VOCABULARY]])
    words = conditioning(prompts, 2, torch.float32)["encoder_hidden_states"]
    assert words.shape == (2, NUM_WORDS, NUM_NAMES)
    assert torch.equal(words.sum(-1), torch.ones(2, NUM_WORDS))
    assert words.argmax(-1).unique().numel() == 2 * NUM_WORDS
    assert conditioning(None, 2, torch.float32)["encoder_hidden_states"].abs().sum() == 0


def test_the_trained_model_draws_what_it_is_told() -> None:
    """Guided pictures are nearer to their own prompt's than to those of others."""
    sampling = Sampling(steps=8, batch=4)
    drawn = sample_pictures(load_small_dit(), sampling, seed=3)
    wanted = draw_pictures(sampling.prompts(3))
    errors = torch.tensor([[(a - b).square().mean() for b in wanted] for a in drawn])
    assert torch.equal(errors.argmin(1), torch.arange(4))
    assert errors.diagonal().mean() < 0.15


def test_branches_and_steps_are_told() -> None:
    told: list[str] = []

    class Branch:
        def __init__(self, name: str) -> None:
            told.append(name)

        def __enter__(self) -> None: ...
        def __exit__(self, *_error: object) -> None: ...

    def model(hidden_states: torch.Tensor, **_inputs: object) -> tuple[torch.Tensor]:
        return (torch.zeros_like(hidden_states),)

    sampling = Sampling(steps=2, batch=1)
    pictures = sample_pictures(model, sampling, 0, Branch, lambda: told.append("end"))
    assert told == ["cond", "uncond", "end"] * 2
    assert torch.equal(pictures, to_pictures(sampling.noise(0)).clamp(-1, 1))


def test_distances_are_those_of_the_formula() -> None:
    exact = draw_pictures(random_prompts(2, torch.Generator().manual_seed(0)))
    same, other = distances(torch.stack([exact[0], exact[1] + 0.02]), exact)
    assert (same.psnr_db, same.mse) == (math.inf, 0.0)
    assert same.ssim == pytest.approx(1.0)
    assert other.mse == pytest.approx(0.0004, rel=1e-3)
    assert other.psnr_db == pytest.approx(40.0, abs=0.01)  # 20 log10(2 / 0.02)
    assert other.ssim < 1


NAMED: dict[str, Policy] = {
    "paper": Paper(),
    "int8": Fixed(Payload.uniform(8)),
    "int1": Fixed(Payload.uniform(1)),
    "int2233": Fixed(Payload((2, 2, 3, 3))),
    "int1248": Fixed(Payload((1, 2, 4, 8))),
    "int2from8": Fixed(Payload.uniform(2), first=Payload.uniform(8, is_intra_coded=True)),
    "int2233from4": Fixed(Payload((2, 2, 3, 3)), first=Payload.uniform(4, is_intra_coded=True)),
    "adaptive30": Adaptive(30.0),
    "skip50": Fixed(Payload((FULL,) * 4, 0.5), refresh=10),
    "skip75o": Fixed(Payload((FULL,) * 4, 0.75, reuses_output=True), refresh=10),
    "int4skip50o": Fixed(Payload((4,) * 4, 0.5, reuses_output=True), refresh=10),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_the_policy_it_says(name: str) -> None:
    assert VMajorOptions.from_mapping(v_major_of(name)).make_policy() == NAMED[name]


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_compared_by_default_are_good_options(name: str) -> None:
    VMajorOptions.from_mapping(v_major_of(name)).make_policy()


@pytest.mark.parametrize(
    "name",
    [
        *("nonsense", "", "paper-sent", "adaptive", "skip", "int", "int22", "int222", "int22333"),
        *("int2from", "int2from88", "intfrom8", "from8", "int-2", "int2233from", "int4 ", "INT4"),
    ],
)
def test_unknown_names_are_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UserError) as caught:
        v_major_of(name)
    for words in (f"unknown policy {name!r}", "paper-seen", "int2233", "int2from8", "skip50o"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int5", "'bits' is 5"),
        ("int0", "'bits' is 0"),
        ("int2253", "'bits' is 5"),
        ("int2from6", "'first_bits' is 6"),
        ("int2233from0", "'first_bits' is 0"),
        ("adaptive400", "'target_psnr_db' is 400"),
        ("skip500", "'skipped_share' is 5.0"),
    ],
)
def test_names_of_what_there_is_not_are_refused_as_options(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        VMajorOptions.from_mapping(v_major_of(name))


def test_settings_survive_json() -> None:
    settings = QualitySettings(("int4",), 6, 3, 4, "bf16", 75)
    assert QualitySettings.from_json(settings.to_json()) == settings
    assert list(settings.seeds) == [0, 1]


@pytest.mark.parametrize("name", ["pictures", "steps", "batch"])
@pytest.mark.parametrize("value", [0, -3])
def test_nothing_to_draw_is_refused(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"--{name} {value}; allowed: 1 or more"):
        QualitySettings(**{name: value})
    assert main(["quality", f"--{name}", str(value)]) == 2


@pytest.mark.parametrize("shares", ["0", "100", "75,", "75;90", "-75", "7.5"])
def test_shares_that_links_cannot_make_are_refused(
    shares: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", f"--shares={shares}"]) == 2
    assert "whole numbers from 1 to 99" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["diffusers", "matplotlib", "skimage"])
def test_what_is_not_installed_is_said_before_anything_runs(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["quality"]) == 2
    words = f"needs {package}: pip install 'cocodiff-compile[quality]'"
    assert words in capsys.readouterr().err


def _result(exact: torch.Tensor, **settings: Any) -> dict[str, Any]:
    """Returns what a run of the exact pictures and of one policy measures."""

    def variant(name: str, pictures: torch.Tensor, sent: int) -> dict[str, object]:
        return {
            "name": name,
            "distances": [item.to_json() for item in distances(pictures, exact)],
            "seconds": [2.0, 4.0] if name == "exact" else [1.0, 1.0],
            "counted_bytes": [600_000, 800_000] if sent else [3_500_000],
            "counted_packets": [1200, 1400] if sent else [5000],
            "sent_bytes": sent,
            "full_bytes": 100 if sent else 0,
            "kinds": {"4 bits": 3} if sent else {},
            "cache_bytes": 2**20,
            "pictures": pictures,
        }

    return {
        "settings": QualitySettings(pictures=len(exact), **settings).to_json(),
        "variants": [variant("exact", exact, 0), variant("int4<b>", exact + 0.02, 25)],
        "rate_mbit": None,
        "ranks": 2,
    }


def _pictures(count: int) -> torch.Tensor:
    return draw_pictures(random_prompts(count, torch.Generator().manual_seed(0)))


def test_a_result_is_written_as_plain_json_and_as_a_page(tmp_path: Path) -> None:
    _write([_result(_pictures(1)), _result(_pictures(1), steps=7)], tmp_path)
    text = (tmp_path / "results.json").read_text()
    found, _ = json.loads(text, parse_constant=_refuse)["results"]
    assert found["variants"][0]["distances"][0]["psnr_db"] is None
    assert "pictures" not in found["variants"][0]
    page = (tmp_path / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == 1, "pictures of the first result"
    assert page.count(">1/4.00<") >= 2, "the table of each result"
    assert "int4&lt;b&gt;" in page
    assert "int4<b>" not in page
    assert page.count("<option value") == 2


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_a_result_is_a_table_and_two_pictures(tmp_path: Path) -> None:
    result = _result(_pictures(2))
    assert saved(result["variants"][1]) == 4.0
    row = format_quality(result).splitlines()[-1]
    assert "1/4.00" in row
    assert "1/5.00" in row  # as counted
    assert "40.0" in row
    assert "3.00x" in row
    assert " 0.7 " in row and " 1,300 " in row  # MB and packets
    assert " 20 " in row  # ms per step, of 50
    assert "3 4 bits" in row
    plot_frontier(result, tmp_path / "frontier.png")
    plot_pictures(result, tmp_path / "pictures.png")
    assert all((tmp_path / name).stat().st_size for name in ("frontier.png", "pictures.png"))
