# SPDX-License-Identifier: Apache-2.0
"""Topology files and probe caches with anything in them: read, or refused by name, at once."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cocodiff_compile.cli import main
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.show_topology import format_topology
from cocodiff_compile.ranks import probe_cache
from cocodiff_compile.ranks.detect import RankLocation, detect
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.files import (
    MAX_LISTED_RANKS,
    load_topology,
    parse_topology,
    topology_data,
)
from cocodiff_compile.topology.measured_phase import MeasuredPhase
from cocodiff_compile.topology.rank_graph import rank_graph
from cocodiff_compile.topology.read_plain_data import MAX_DEPTH, MAX_JSON_BYTES, MAX_YAML_BYTES
from tests.support.odd_values import plain_values
from tests.support.topology_data import two_node_data

pytestmark = pytest.mark.timeout(60)

FUZZ = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DEEP = 100_000


def _data() -> dict[str, Any]:
    points = [[1e4, 1e-4], [1e6, 1e-3]]
    return {
        **two_node_data(),
        "measured": [{"axes": ["tile"], "points": points, "in_flight": 4}],
    }


def _boxes(ranks: Any = "0-3") -> dict[str, Any]:
    data = _data()
    del data["axes"], data["measured"]
    data["boxes"] = [
        {"link": "pcie", "ranks": [0, 1]},
        {"link": "pcie", "ranks": [2, 3]},
        {"link": "ethernet", "ranks": ranks},
    ]
    return data


GOOD_JSON = json.dumps(_data())

BAD_FILES: dict[str, tuple[str, bytes | str, str]] = {
    "not UTF-8": ("m.yaml", b"name: caf\xe9\n", "not UTF-8 text.*byte 9"),
    "UTF-16": ("m.json", GOOD_JSON.encode("utf-16"), "not UTF-8"),
    "empty JSON": ("m.json", b"", "cannot be parsed"),
    "empty YAML": ("m.yaml", b"", "the file is None"),
    "lists in lists, JSON": ("m.json", "[" * DEEP + "]" * DEEP, "too deep"),
    "dicts in dicts, JSON": ("m.json", '{"a":' * DEEP + "1" + "}" * DEEP, "too deep"),
    "deeper than allowed": ("m.json", "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "too deep"),
    "lists in lists, YAML": ("m.yaml", "[" * DEEP, "too deep"),
    "dicts in dicts, YAML": ("m.yaml", "{a: " * 30_000, "too deep"),
    "dashes": ("m.yaml", "- " * 60_000, "too deep"),
    "indented": ("m.yaml", "\n".join(" " * n + "b:" for n in range(200)), "too deep"),
    "a key twice, JSON": ("m.json", '{"name": "a", "name": "b"}', "key 'name' occurs twice"),
    "a key twice, YAML": ("m.yaml", "name: a\nname: b\n", "key 'name' occurs twice"),
    "a link twice": (
        "m.yaml",
        "name: a\nlinks: {pcie: {latency_s: 1}, pcie: {latency_s: 2}}\n",
        "key 'pcie' occurs twice",
    ),
    "NaN": ("m.json", GOOD_JSON.replace("20000000000.0", "NaN"), "of link 'pcie' is nan"),
    "Infinity": ("m.json", GOOD_JSON.replace("5e-06", "Infinity"), "latency_s.*'pcie' is inf"),
    "endless number": ("m.json", GOOD_JSON.replace("5e-06", "9" * 5_000), "cannot be parsed"),
    "endless hex": ("m.yaml", f"name: {hex(1 << 20_000)}", "the file has the keys name"),
    "laughs": (
        "m.yaml",
        "a: &a [x, x]\n" + "\n".join(f"{c}: &{c} [*{p}, *{p}]" for p, c in zip("abc", "bcd")),  # noqa: B905
        r"alias \*a is not supported",
    ),
    "laughs by merging": ("m.yaml", "a: &a {x: 1}\nb: {<<: [*a, *a]}", r"alias \*a"),
    "itself inside": ("m.yaml", "&a [*a]", r"alias \*a"),
    "tag without a number": ("m.yaml", 'name: !!int ""', "cannot be parsed"),
    "tag without a date": ("m.yaml", "name: !!timestamp x", "cannot be parsed"),
    "tag of Python": ("m.yaml", "name: !!python/object:os.system x", "cannot be parsed"),
    "no such date": ("m.yaml", "name: 2020-13-45", "cannot be parsed"),
    "a list as a key": ("m.yaml", "? [a]\n: b", "cannot be parsed"),
    "long JSON": ("m.json", " " * MAX_JSON_BYTES + "{}", "too long"),
    "long YAML": ("m.yaml", "#" * MAX_YAML_BYTES + "\n", "too long"),
    "zeros": ("m.yaml", b"\0" * 100, "cannot be parsed"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, content, message = BAD_FILES[case]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"(?s)topology file .*{name}: .*{message}") as caught:
        load_topology(file)
    assert len(str(caught.value)) < 2_000
    with pytest.raises(ValueError, match=name):
        CompileConfig.from_options({"topology": file})


def test_what_other_editors_write_is_read(tmp_path: Path) -> None:
    """A byte order mark, and YAML 1.2's numbers, which JSON has too."""
    file = tmp_path / "m.json"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD_JSON.encode())
    assert load_topology(file) == parse_topology(_data())
    (tmp_path / "m.yaml").write_text(GOOD_JSON.replace("20000000000.0", "2e10"))
    assert load_topology(tmp_path / "m.yaml") == parse_topology(_data())


def _paths(folder: Path) -> Iterator[tuple[str, str]]:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    yield str(folder / "pipe.yaml"), "no regular file"
    yield str(folder / "folder.yaml"), "folder"
    yield str(folder / "loop.yaml"), "cannot be read"
    yield str(folder / "missing.yaml"), "No such file"
    yield "/dev/zero", "no regular file"
    yield "x" * 5_000, "too long"
    yield "/".join(["x" * 100] * 50), "too long"
    yield "with\0zero.yaml", "null"


def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, message in _paths(tmp_path):
        with pytest.raises(ValueError, match=f"topology file .*{message}") as caught:
            load_topology(Path(path))
        with pytest.raises(ValueError, match=f"'topology'.*allowed: 'auto'.*{message}"):
            CompileConfig.from_options({"topology": path})
        assert main(["topology", path]) == 2
        assert message in capsys.readouterr().err
        assert len(str(caught.value)) < 2_000


def test_a_pipe_that_appears_late_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe appears after the kind of the file was checked, before it is read."""
    os.mkfifo(tmp_path / "pipe.yaml")
    monkeypatch.setattr("cocodiff_compile.topology.read_plain_data.why_no_file", lambda _: "")
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(ValueError, match="the file is None"):
            load_topology(tmp_path / "pipe.yaml")
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(timeout=30)


BAD_FIELDS = [
    ("copy_bytes_per_s", 10**400, "copy_bytes_per_s is <a whole number of 1329 bits>"),
    ("copy_bytes_per_s", 1e-320, "copy_bytes_per_s is"),
    ("copy_bytes_per_s", 1e300, "copy_bytes_per_s is 1e\\+300"),
    ("copy_bytes_per_s", [1e9], "copy_bytes_per_s is"),
    ("copy_bytes_per_s", "1e9", "copy_bytes_per_s is '1e9'"),
    ("copy_bytes_per_s", True, "copy_bytes_per_s is True"),
    ("links.pcie.latency_s", 10**400, "latency_s of link 'pcie' is"),
    ("links.pcie.bytes_per_s", -5, "bytes_per_s of link 'pcie' is -5"),
    ("links.pcie.ranks_per_link", 0, "ranks_per_link of link 'pcie' is 0"),
    ("links.pcie", 3, "link 'pcie' is 3"),
    ("links", {str(n): {} for n in range(1_000)}, "links has 1000 entries"),
    ("links", {"a\nb": {"bytes_per_s": 1, "latency_s": 1}}, "a name in links is 'a.*nb'"),
    ("axes.0.size", 10**400, "size of axis 0 is"),
    ("axes.0.size", 2.0, "size of axis 0 is 2.0"),
    ("axes.0.name", ["tile"], r"name of axis 0 is \['tile'\]"),
    ("axes.0.name", True, "name of axis 0 is True"),
    ("name", "\ud800", "name is"),
    ("name", "x" * 1_000, "name is 'xxx"),
    ("name", None, "name is None"),
    ("measured.0.points", [[10**400, 1], [2, 2]], "bytes in points of measured is"),
    ("measured.0.points", [[1, "1"], [2, 2]], "seconds in the points is '1'"),
    ("measured.0.points", [[1, 1, 1]], "points of measured are"),
    ("measured.0.points", "1122", "points of measured are '1122'"),
    ("measured.0.in_flight", 10**400, "in_flight of measured is"),
    ("measured.0.axes", [["tile"]], "an axis of measured is"),
]


def _with(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    place: Any = data
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    return data


@pytest.mark.parametrize(("path", "value", "message"), BAD_FIELDS)
def test_a_bad_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_topology(_with(_data(), path, value))
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0-100000000000", "ranks of box 2 is '0-100000000000'; allowed: 16384 ranks"),
        (f"0-{'9' * 5_000}", "ranks of box 2 is"),
        ("\u0660-\u0663", "ranks of box 2 is"),
        ([0, 10**400], "ranks of box 2 is .* from 0 to 16383"),
        ([0, 10**12], "ranks of box 2 is .* from 0 to 16383"),
        (list(range(MAX_LISTED_RANKS)), "ranks of box 2 is .*all boxes together"),
        ([0, 1.0], "ranks of box 2 is"),
        ([[0, 1]], "ranks of box 2 is"),
    ],
)
def test_ranks_without_end_are_refused(ranks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_topology(_boxes(ranks))


def test_as_many_listed_ranks_as_are_allowed_fold() -> None:
    half = MAX_LISTED_RANKS // 2
    data = _boxes()
    data["boxes"] = [{"link": "pcie", "ranks": [n, n + 1]} for n in range(0, half, 2)]
    data["boxes"].append({"link": "ethernet", "ranks": f"0-{half - 1}"})
    assert [axis.size for axis in parse_topology(data).axes] == [2, half // 2]


def test_a_machine_without_end_is_refused() -> None:
    data = _data()
    data["axes"] = [{"name": f"a{n}", "size": 2, "link": "pcie"} for n in range(20)]
    with pytest.raises(ValueError, match="has 20 axes; allowed: 6"):
        parse_topology({**data, "measured": []})
    data["axes"] = [{"name": f"a{n}", "size": 2_000, "link": "pcie"} for n in range(2)]
    with pytest.raises(ValueError, match="more than 1048576 ranks"):
        parse_topology({**data, "measured": []})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flat", "--ranks", "100000000000"], "more than 1048576 ranks"),
        (["flat", "--ranks", "100000", "--draw", "a.svg"], "cannot draw 100000 ranks"),
        (["flat", "--ranks", "4", "--save", "x" * 300], "File name too long"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--ranks", "9" * 5_000), ("--ranks", "²"), ("--save", f"{'x' * 300}/{'y' * 300}/file")],
)
def test_arguments_that_are_none_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["topology", "flat", option, value])
    assert caught.value.code == 2


@FUZZ
@given(st.binary(max_size=400), st.sampled_from(["m.json", "m.yaml"]))
def test_any_bytes_are_a_topology_or_a_value_error_with_the_name(
    tmp_path: Path, content: bytes, name: str
) -> None:
    (tmp_path / name).write_bytes(content)
    _loads_or_is_refused(tmp_path / name)


@FUZZ
@given(st.data(), st.sampled_from(["m.json", "m.yaml"]))
def test_any_damage_to_a_file_is_a_value_error_with_the_name(
    tmp_path: Path, data: st.DataObject, name: str
) -> None:
    text = GOOD_JSON
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 12)))
    new = data.draw(
        st.text(max_size=6) | st.sampled_from(["*a", "&a ", "!!int ", "1e999", "{", "["])
    )
    (tmp_path / name).write_bytes((text[:begin] + new + text[end:]).encode("utf-8", "replace"))
    _loads_or_is_refused(tmp_path / name)


def _loads_or_is_refused(file: Path) -> None:
    try:
        topology = load_topology(file)
    except UserError as error:  # and nothing else, not even another ValueError
        assert file.name in str(error)
        return
    _is_usable(topology)


def _places(value: Any, path: str = "") -> Iterator[str]:
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        yield f"{path}{key}"
        if isinstance(part, (dict, list)):
            yield from _places(part, f"{path}{key}.")


@FUZZ
@given(st.sampled_from([_data, _boxes]), st.data(), plain_values())
def test_any_value_in_any_field_is_a_topology_or_a_value_error(
    make: Any, data: st.DataObject, value: Any
) -> None:
    whole = make()
    path = data.draw(st.sampled_from(list(_places(whole))))
    *parents, last = path.split(".")
    place = whole
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    try:
        topology = parse_topology(whole)
    except UserError:  # and nothing else, not even another ValueError
        return
    _is_usable(topology)


def _is_usable(topology: Topology) -> None:
    """Tables and the graph of ranks come out, and it survives being written."""
    assert format_topology(topology)
    assert parse_topology(json.loads(json.dumps(topology_data(topology)))) == topology
    if topology.num_ranks < 1_000:
        assert rank_graph(topology)


# The probe's cache: what is no topology counts as no cache

MACHINE = detect([RankLocation("a")] * 4).topology
MEASURED = replace(MACHINE, measured=(MeasuredPhase((), ((1e4, 0.1), (1e6, 0.3))),))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe_cache.save("k", MEASURED)
    assert probe_cache.load("k", MACHINE) == MEASURED
    return probe_cache.file_of("k")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("1000000.0", "1" + "0" * 400),
        lambda text: text.replace("1000000.0", "1e999"),
        lambda text: text.replace("0.3", "1" + "0" * 400),
        lambda text: text.replace("10000.0", "9" * 5_000),
        lambda _: "[" * DEEP,
        lambda _: '{"a":' * DEEP,
        lambda text: text + " " * MAX_JSON_BYTES,
        lambda text: text.replace('"size": 2', '"size": 3', 1),
        lambda text: json.dumps({**json.loads(text), "measured": []}),
        lambda _: json.dumps(topology_data(parse_topology(_data()))),
    ],
    ids=range(10),
)
def test_a_damaged_cache_is_none(cache: Path, damage: Any) -> None:
    text = cache.read_text()
    assert damage(text) != text
    cache.write_text(damage(text))
    assert probe_cache.load("k", MACHINE) is None
    probe_cache.save("k", MEASURED)
    assert probe_cache.load("k", MACHINE) == MEASURED


def test_a_cache_that_is_no_file_is_none(cache: Path) -> None:
    cache.unlink()
    os.mkfifo(cache)
    assert probe_cache.load("k", MACHINE) is None
    cache.unlink()
    cache.mkdir()
    assert probe_cache.load("k", MACHINE) is None


def test_without_a_home_folder_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    probe_cache.save("k", MEASURED)
    assert probe_cache.load("k", MACHINE) is None
    assert "no file" in probe_cache.describe_file("k")


@pytest.mark.parametrize("folder", ["x" * 5_000, "/dev/null", "/proc/nowhere"])
def test_a_cache_folder_that_is_none_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    probe_cache.save("k", MEASURED)
    assert probe_cache.load("k", MACHINE) is None


@FUZZ
@given(st.data())
def test_any_damage_to_a_cache_is_none_or_still_of_this_machine(
    cache: Path, data: st.DataObject
) -> None:
    text = json.dumps(topology_data(MEASURED))
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 12)))
    cache.write_bytes(
        text[:begin].encode() + data.draw(st.binary(max_size=6)) + text[end:].encode()
    )
    found = probe_cache.load("k", MACHINE)
    assert found is None or replace(found, measured=()) == MACHINE
