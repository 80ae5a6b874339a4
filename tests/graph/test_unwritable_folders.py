# SPDX-License-Identifier: Apache-2.0
"""Folders that cannot be written: this rank says so and goes on, since others wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.compat import inductor_folder
from cocodiff_compile.compiler.code_folder import VARIABLE, ensure_code_folder
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.report.dumps import FolderDump
from tests.support.captured import fake_ranks
from tests.support.ulysses_block import WIDTH, Block

X = torch.zeros(1, 4, WIDTH)


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """A path that can never be one, not even for root."""
    file = tmp_path / "a file"
    file.touch()
    return file / "folder"


def test_a_dump_that_cannot_be_written_is_said_once(
    tmp_path: Path, said: Callable[[str], int]
) -> None:
    torch._dynamo.reset()
    tmp_path.joinpath("rank_001").touch()  # where the folder of this rank would be
    with fake_ranks(4, rank=1):
        recognition = cocodiff_compile.explain(Block().eval(), X, options={"debug_dir": tmp_path})
    assert len(recognition.sites) == 1
    assert said("dumps of this rank are incomplete") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_disk_that_is_full_ends_a_dump_in_the_middle(
    tmp_path: Path, said: Callable[[str], int]
) -> None:
    module = torch.fx.symbolic_trace(torch.nn.ReLU())
    dump = FolderDump(tmp_path / "graph", 0, 0)
    dump.captured(module)
    tmp_path.joinpath("graph", "01_a-pass.py").symlink_to("/dev/full")
    dump.after_pass("a-pass", module, PassResult(changed=False))
    dump.after_pass("another-pass", module, PassResult(changed=False))
    assert said("No space left on device") == 1
    written = {file.name for file in tmp_path.joinpath("graph").iterdir()}
    assert written == {"00_captured.py", "01_a-pass.py", "op_counts.txt"}


def test_inductor_gets_another_folder(
    no_folder: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(no_folder))
    ensure_code_folder()
    assert inductor_folder() != str(no_folder)
    assert Path(os.environ[VARIABLE]).is_dir()
    assert said("cannot be written") == 1


def test_a_folder_that_can_be_written_stays(
    tmp_path: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    ensure_code_folder()
    assert inductor_folder() == str(tmp_path / "new")
    assert said("cannot be written") == 0
