# SPDX-License-Identifier: Apache-2.0
"""`cocodiff coverage`: transformer classes of diffusers on simulated ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocodiff_compile.cli import main
from cocodiff_compile.lab.coverage.classes import CLASSES, build, transformer_classes
from cocodiff_compile.lab.coverage.command import is_wrong
from cocodiff_compile.lab.coverage.examine import LARGEST_ERROR, examine

DECLINED = {
    "GlmImageTransformer2DModel": "the model writes to its inputs",
    "Kandinsky6SRTransformer3DModel": "reads more than query, key, value and mask",
    "MochiTransformer3DModel": "gains nothing",
    "T5FilmDecoder": "no attention in it",
}


def test_every_class_has_a_tiny_configuration() -> None:
    assert not CLASSES.keys() - set(transformer_classes())
    for name in transformer_classes():
        build(name)


def _check(name: str) -> None:
    found = examine(name, *build(name), num_ranks=4)
    if name in DECLINED:
        assert DECLINED[name] in found.reason
        return
    assert not found.reason
    assert found.error <= LARGEST_ERROR


@pytest.mark.parametrize(
    "name",
    ["DiTTransformer2DModel", "CogView4Transformer2DModel", "ZImageTransformer2DModel", *DECLINED],
)
def test_a_class_is_shared_out_or_declined(name: str) -> None:
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", transformer_classes())
def test_all_classes_are_shared_out_or_declined(name: str) -> None:
    _check(name)


def test_the_command_prints_a_row_for_each_class(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "models.md"
    assert main(["coverage", "--classes", "PriorTransformer", "--markdown", str(table)]) == 0
    printed = capsys.readouterr().out
    assert "[1/1] PriorTransformer: 2 Ulysses of 2 attentions, 2 sites, 1 gathers" in printed
    assert "| PriorTransformer | 2 | 2 Ulysses | 1 | 1 |" in table.read_text()


def test_a_class_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--classes", "NoSuchThing"]) == 2
    assert "NoSuchThing" in capsys.readouterr().err


def test_a_result_that_is_wrong_is_called_wrong() -> None:
    found = examine("PriorTransformer", *build("PriorTransformer"), num_ranks=4)
    assert not is_wrong(found)
    found.error = float("nan")
    assert is_wrong(found)
