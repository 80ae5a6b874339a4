# SPDX-License-Identifier: Apache-2.0
"""Topologies: places of ranks, presets, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.cli import main
from cocodiff_compile.topology.axes import Axis, Topology
from cocodiff_compile.topology.files import load_topology, parse_topology
from cocodiff_compile.topology.presets import ANY, PRESETS, ranks_per_node
from tests.support.topology_data import two_node_data

ROOT = Path(__file__).parents[2]


def _grid(*sizes: int) -> Topology:
    return Topology("grid", tuple(Axis(f"a{n}", size, ANY) for n, size in enumerate(sizes)), 1e9)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.data())
def test_rank_and_coordinates_are_each_others_inverse(sizes: list[int], data: Any) -> None:
    topology = _grid(*sizes)
    rank = data.draw(st.integers(0, topology.num_ranks - 1))
    assert topology.rank_at(topology.coordinates(rank)) == rank


@given(st.lists(st.integers(2, 5), min_size=1, max_size=3), st.data())
def test_ranks_along_some_axes_split_the_machine(sizes: list[int], data: Any) -> None:
    topology = _grid(*sizes)
    names = data.draw(st.sets(st.sampled_from([axis.name for axis in topology.axes])))
    groups = {topology.ranks_along(rank, names) for rank in range(topology.num_ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(topology.num_ranks))
    for group in groups:
        assert list(group) == sorted(group)
        places = [topology.coordinates(rank) for rank in group]
        for number, axis in enumerate(topology.axes):
            seen = {place[number] for place in places}
            assert len(seen) == (axis.size if axis.name in names else 1)


@pytest.mark.parametrize(
    ("name", "num_ranks", "sizes"),
    [
        ("aurora", 96, {"tile": 2, "gpu": 6, "node": 8}),
        ("aurora", 12, {"tile": 2, "gpu": 6}),
        ("aurora", 4, {"tile": 2, "gpu": 2}),
        ("dgx-h100", 16, {"gpu": 8, "node": 2}),
        ("dgx-h100", 4, {"gpu": 4}),
        ("flat", 7, {"rank": 7}),
    ],
)
def test_presets_fill_the_group(name: str, num_ranks: int, sizes: dict[str, int]) -> None:
    topology = PRESETS[name](num_ranks)
    assert {axis.name: axis.size for axis in topology.axes} == sizes
    assert topology.num_ranks == num_ranks


def test_ranks_of_a_full_node() -> None:
    assert {name: ranks_per_node(name) for name in PRESETS} == {
        "aurora": 12,
        "dgx-h100": 8,
        "flat": 1,
    }


@pytest.mark.parametrize(("name", "num_ranks"), [("aurora", 7), ("aurora", 18), ("dgx-h100", 12)])
def test_a_preset_that_cannot_fill_the_group_is_refused(name: str, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks} ranks do not fill whole levels"):
        PRESETS[name](num_ranks)


def test_aurora_pairs_the_tiles_of_a_gpu() -> None:
    aurora = PRESETS["aurora"](24)
    assert aurora.ranks_along(5, ["tile"]) == (4, 5)
    assert aurora.ranks_along(5, ["gpu", "node"]) == tuple(range(1, 24, 2))
    assert aurora.ranks_along(13, ["tile", "gpu"]) == tuple(range(12, 24))


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(two_node_data()))
    assert load_topology(file) == load_topology(ROOT / "examples" / "two_nodes.yaml")
    assert load_topology(file).axis("node").link.both_ways_bytes_per_s == 2.5e9


def test_boxes_of_ranks_fold_into_the_same_machine() -> None:
    boxes = load_topology(ROOT / "examples" / "two_nodes_boxes.json")
    axes = load_topology(ROOT / "examples" / "two_nodes.yaml")
    assert [(axis.name, axis.size) for axis in boxes.axes] == [("pcie", 2), ("ethernet", 2)]
    assert [axis.link for axis in boxes.axes] == [axis.link for axis in axes.axes]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([("pcie", [0, 1]), ("token-ring", [2, 3])], "box 1 is 'token-ring'; defined links: pcie"),
        ([("pcie", [0, 1]), ("pcie", [1, 2])], "rank 1 is listed 2 times in the boxes of link"),
        ([("pcie", [0, 0])], "rank 0 is listed 2 times"),
        ([("pcie", [0, 1]), ("pcie", [2, 3, 4])], "joins ranks 0-1 and ranks 2-4"),
        ([("pcie", [0, 1]), ("pcie", [3, 4])], "rank 2 missing"),
        ([("pcie", "1-3")], "rank 0 missing"),
        ([("pcie", [0, 1]), ("ethernet", "0-3")], "'pcie' does not reach ranks 2-3"),
        ([("pcie", [0, 1]), ("pcie", [2, 3])], "no link joins ranks 0-1 with ranks 2-3"),
        ([("pcie", [0])], r"ranks of box 0 is \[0\]; allowed: two ranks or more"),
        ([("pcie", [0, -1])], "ranks of box 0 is"),
        ([("pcie", [0, "1"])], "ranks of box 0 is"),
        ([("pcie", "3-0")], "ranks of box 0 is '3-0'"),
        ([("pcie", 4)], "ranks of box 0 is 4"),
        ([(["pcie"], [0, 1])], "link of box 0 is"),
        ([], "boxes is .*allowed: a list of boxes"),
    ],
)
def test_boxes_that_make_no_machine_are_refused(boxes: list[tuple[Any, Any]], message: str) -> None:
    data = two_node_data()
    del data["axes"]
    data["boxes"] = [{"link": link, "ranks": ranks} for link, ranks in boxes]
    with pytest.raises(ValueError, match=message):
        parse_topology(data)


def _with(path: str, value: Any) -> dict[str, Any]:
    data: Any = two_node_data()
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    if value is _GONE:
        del place[last]
    else:
        place[last] = value
    return data  # type: ignore[no-any-return]


_GONE = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "links.pcie.bytes_per_s",
            -1,
            "bytes_per_s of link 'pcie' is -1; allowed: a number above 0",
        ),
        ("links.pcie.bytes_per_s", "fast", "bytes_per_s of link 'pcie' is 'fast'"),
        ("links.pcie.latency_s", 0, "latency_s of link 'pcie' is 0"),
        ("links.pcie.latency_s", _GONE, "needed: bytes_per_s, latency_s"),
        ("links.pcie.colour", "red", "link 'pcie' has the keys .*colour"),
        ("axes.1.link", "token-ring", "is 'token-ring'; defined links: pcie, ethernet"),
        ("axes.1.size", 1, "size of axis 1 is 1; allowed: a whole number from 2"),
        ("axes.1.size", True, "size of axis 1 is True"),
        ("axes.1.name", "tile", "axes are named tile, tile; allowed: each name once"),
        ("axes", [], "allowed: a list of axes"),
        ("axes", _GONE, "needed: name, copy_bytes_per_s, links, axes"),
        ("copy_bytes_per_s", float("inf"), "copy_bytes_per_s is inf"),
        ("extra", 1, "the file has the keys .*extra"),
        ("boxes", [], "needed: name, copy_bytes_per_s, links, boxes"),
        ("measured", 5, "measured is 5; allowed: a list"),
        ("measured", [{"axes": 5, "points": []}], "axes is 5; allowed: a list"),
        ("measured", [{"axes": [], "points": [1]}], "points of measured are"),
        ("measured", [{"axes": ["up"], "points": [[1, 1], [2, 2]]}], "no axis 'up'"),
    ],
)
def test_a_bad_field_is_named_with_what_is_allowed(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_topology(_with(path, value))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "cannot be parsed"),
        ("a.yaml", "a: [", "cannot be parsed"),
        ("a.yaml", "just text", "the file is 'just text'"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"(?s){name}.*{message}"):
        load_topology(tmp_path / name)


def test_a_topology_of_another_size_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"has 4 ranks \(2 tile x 2 node\), the group has 8"):
        parse_topology(two_node_data()).for_ranks(8)


def test_the_command_shows_axes_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "aurora", "--ranks", "96"]) == 0
    shown = capsys.readouterr().out
    assert "96 ranks = 2 tile x 6 gpu x 8 node" in shown
    assert "estimated by the cost model, not measured" in shown
    assert main(["topology", str(ROOT / "examples" / "two_nodes.yaml")]) == 0
    assert "4 ranks = 2 tile x 2 node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["aurora"], "say how many"),
        (["aurora", "--ranks", "7"], "do not fill"),
        (["no-such-machine"], "neither a preset (aurora, dgx-h100, flat, auto) nor a file"),
        (["examples/two_nodes.yaml", "--ranks", "8"], "the group has 8"),
        (["auto"], "torchrun --nproc-per-node 4 -m cocodiff_compile.cli topology auto"),
        (["aurora", "--ranks", "12", "--draw", "a.pdf"], "a name that ends in .png or .svg"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["topology", *arguments]) == 2
    assert message in capsys.readouterr().err
