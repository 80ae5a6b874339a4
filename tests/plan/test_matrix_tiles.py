# SPDX-License-Identifier: Apache-2.0
"""AMX that is announced and cannot run: tried once, in a process of its own, and gone around."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocodiff_compile.compat import TESTED_TORCH
from cocodiff_compile.devices.installed import Installed
from cocodiff_compile.lab.doctor import examine
from cocodiff_compile.lab.doctor.examine import Host
from cocodiff_compile.ranks.launch import matrix_tiles
from cocodiff_compile.ranks.launch.matrix_tiles import (
    SETTING,
    WITHOUT_TILES,
    avoid_broken_tiles,
    tiles_are_broken,
)

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def announced(tmp_path: Path) -> Path:
    file = tmp_path / "cpuinfo"
    file.write_text("flags : avx512_bf16 amx_bf16 amx_tile")
    return file


@pytest.mark.parametrize(
    ("multiply", "is_broken"), [(DIES, True), ("1 + 1", False), ("1 / 0", False)]
)
def test_broken_is_what_a_signal_ends(announced: Path, multiply: str, is_broken: bool) -> None:
    """A torch that cannot be imported, say, is another matter."""
    assert tiles_are_broken(announced, multiply) == is_broken


def test_nothing_is_tried_where_no_tiles_are_announced(tmp_path: Path) -> None:
    plain = tmp_path / "cpuinfo"
    plain.write_text("flags : avx2")
    assert not tiles_are_broken(plain, DIES)
    assert not tiles_are_broken(tmp_path / "absent", DIES)


def test_broken_tiles_are_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_tiles, "tiles_are_broken", lambda: True)
    environment: dict[str, str] = {}
    avoid_broken_tiles(environment)
    assert environment == {SETTING: WITHOUT_TILES}


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_tiles, "tiles_are_broken", lambda: True)
    environment = {SETTING: "ALL"}
    avoid_broken_tiles(environment)
    assert environment == {SETTING: "ALL"}


def test_tiles_that_work_are_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_tiles, "tiles_are_broken", lambda: False)
    environment: dict[str, str] = {}
    avoid_broken_tiles(environment)
    assert not environment


@pytest.mark.parametrize(
    ("environment", "counts", "is_told"),
    [({}, {}, True), ({SETTING: WITHOUT_TILES}, {}, False), ({}, {"cuda": 1}, False)],
)
def test_the_doctor_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    counts: dict[str, int],
    is_told: bool,
) -> None:
    monkeypatch.setattr(examine, "tiles_are_broken", lambda: True)
    found = examine.examine(Host(Installed(TESTED_TORCH[0], counts), environment))
    told = [item for item in found if item.what == "AMX"]
    assert bool(told) == is_told
    for item in told:
        assert item.status == "warning"
        assert f"export {SETTING}={WITHOUT_TILES}" in item.text
