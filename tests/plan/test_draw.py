# SPDX-License-Identifier: Apache-2.0
"""Pictures of topologies."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.cli import main
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.draw import (
    BAR,
    HEADER,
    Placed,
    draw_topology,
    lay_out,
    nics_per_part,
)
from cocodiff_compile.topology.measured_phase import MeasuredPhase
from cocodiff_compile.topology.presets import PRESETS


def _grid(sizes: list[int]) -> Topology:
    axes = [Axis(f"a{n}", size, Link(f"l{n}", 1e9, 2e9, 1e-5)) for n, size in enumerate(sizes)]
    return Topology("grid", tuple(axes), 1e9)


def _inside(inner: Placed, outer: Placed) -> bool:
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


def _apart(a: Placed, b: Placed) -> bool:
    sideways = a.x + a.width <= b.x or b.x + b.width <= a.x
    return sideways or a.y + a.height <= b.y or b.y + b.height <= a.y


@given(st.lists(st.integers(2, 7), min_size=1, max_size=3))
def test_parts_lie_inside_their_box_and_apart(sizes: list[int]) -> None:
    topology = _grid(sizes)
    for box in lay_out(topology).every():
        parts = [part for row in box.rows for part in row]
        assert all(_inside(part, box) for part in parts)
        assert all(part.y + part.height <= box.y + box.height - HEADER + 1e-9 for part in parts)
        assert all(part.y >= box.y + BAR for part in parts)
        assert all(_apart(a, b) for a, b in itertools.combinations(parts, 2))


@given(st.lists(st.integers(2, 7), min_size=1, max_size=3))
def test_every_rank_and_every_box_is_there_once(sizes: list[int]) -> None:
    topology = _grid(sizes)
    placed = list(lay_out(topology).every())
    ranks = [int(box.label) for box in placed if box.axis is None]
    assert ranks == list(range(topology.num_ranks))


def test_boxes_are_named_by_their_place_on_the_next_axis() -> None:
    machine = lay_out(PRESETS["aurora"](24))
    second = [part for row in machine.rows for part in row][1]
    assert second.label == "node 1"
    assert [part.label for row in second.rows for part in row] == [f"gpu {n}" for n in range(6)]


def test_nics_are_drawn_where_ranks_share_them() -> None:
    assert nics_per_part(PRESETS["aurora"](24)) == {"tile": 1, "gpu": 1, "node": 8}
    assert nics_per_part(PRESETS["dgx-h100"](16)) == {"gpu": 1, "node": 8}


def test_the_command_draws_an_svg_with_every_rank_and_link(tmp_path: Path) -> None:
    path = tmp_path / "aurora.svg"
    assert main(["topology", "aurora", "--ranks", "96", "--draw", str(path)]) == 0
    words = [text.strip() for text in ElementTree.parse(path).getroot().itertext()]
    assert {str(rank) for rank in range(96)} <= set(words)
    assert "aurora: 96 ranks = 2 tile x 6 gpu x 8 node" in words
    for link in ("tile: 185 GB/s", "xe-link: 15 GB/s", "slingshot-11: 20 GB/s"):
        assert any(word.startswith(link) for word in words)


def test_what_was_measured_is_written_below(tmp_path: Path) -> None:
    aurora = PRESETS["aurora"](12)
    points = ((1e4, 0.001), (2e6, 0.0025))
    measured = tuple(MeasuredPhase(axes, points) for axes in ((), ("tile",), ("tile", "gpu")))
    draw_topology(replace(aurora, measured=measured), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "measured at 2 MB per rank: tile 2.5 ms, flat 2.5 ms<" in text


def test_a_png_is_a_png_and_the_same_svg_is_drawn_twice(tmp_path: Path) -> None:
    topology = PRESETS["dgx-h100"](16)
    draw_topology(topology, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for name in ("a.svg", "b.svg"):
        draw_topology(topology, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.pdf", r"allowed: a name that ends in \.png or \.svg"), ("no/a.svg", "cannot write")],
)
def test_what_cannot_be_drawn_to_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_topology(PRESETS["flat"](4), tmp_path / name)


def test_a_missing_matplotlib_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'cocodiff-compile\[plots\]'"):
        draw_topology(PRESETS["flat"](4), tmp_path / "a.svg")


def test_what_the_command_saves_it_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    assert main(["topology", "aurora", "--ranks", "24", "--save", str(path)]) == 0
    shown = capsys.readouterr().out
    assert main(["topology", str(path)]) == 0
    assert capsys.readouterr().out == shown
