# SPDX-License-Identifier: Apache-2.0
"""Tests the cache on disk of what a probe measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cocodiff_compile.ranks.detect import RankLocation, detect
from cocodiff_compile.ranks.probe_cache import cache_key, file_of, load, probe_wanted, save
from cocodiff_compile.say_once import forget_what_was_said
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.measured_phase import MeasuredPhase

PLACES = [RankLocation("a")] * 4
MACHINE = detect(PLACES).topology


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _topology() -> Topology:
    topology = detect(PLACES).topology
    return replace(topology, measured=(MeasuredPhase((), ((1e4, 0.1 + 0.2), (1e6, 1 / 3))),))


def test_what_was_saved_is_loaded_bit_for_bit() -> None:
    assert load("k", MACHINE) is None
    save("k", _topology())
    assert load("k", MACHINE) == _topology()
    assert [file.name for file in file_of("k").parent.iterdir()] == ["probe-k.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 1}', "\x00\xff"])
def test_a_corrupt_file_is_none_and_is_rewritten(text: str) -> None:
    save("k", _topology())
    file_of("k").write_text(text)
    assert load("k", MACHINE) is None
    save("k", _topology())
    assert load("k", MACHINE) == _topology()


def test_a_file_with_a_wrong_measurement_is_none() -> None:
    save("k", _topology())
    file_of("k").write_text(file_of("k").read_text().replace("1000000.0", "-1"))
    assert load("k", MACHINE) is None
    file_of("k").write_text('{"name": 1, "copy_bytes_per_s": 1, "links": {}, "measured": 5}')
    assert load("k", MACHINE) is None


def test_a_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forget_what_was_said()
    (tmp_path / "cache").write_text("a file")
    save("k", _topology())
    save("k", _topology())
    assert load("k", MACHINE) is None
    assert caplog.text.count("cannot be saved") == 1


def test_the_home_folder_is_used_without_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert file_of("k") == Path.home() / ".cache" / "cocodiff" / "probe-k.json"


def test_the_key_is_the_shape_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(locations: list[RankLocation], backend: str = "gloo") -> str:
        return cache_key(detect(locations).topology, locations, backend)

    base = key(PLACES)
    assert key([RankLocation("another host")] * 4) == base
    measured = cache_key(_topology(), PLACES, "gloo")
    assert measured == base
    others = [
        key([RankLocation("a")] * 6),
        key([RankLocation("a"), RankLocation("a"), RankLocation("b"), RankLocation("b")]),
        key([replace(location, device_name="another") for location in PLACES]),
        key(PLACES, "nccl"),
    ]
    monkeypatch.setattr(os, "cpu_count", lambda: 1234)
    others.append(key(PLACES))
    assert len({base, *others}) == 6


def test_interleaved_hosts_have_a_key_of_their_own() -> None:
    topology = detect([RankLocation(host) for host in "abab"]).topology
    keys = {
        cache_key(topology, [RankLocation(host) for host in hosts], "gloo")
        for hosts in ("abab", "abba", "aaab")
    }
    assert len(keys) == 3


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("1", True), ("0", False)])
def test_the_probe_can_be_skipped(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COCODIFF_PROBE", raising=False)
    if value is not None:
        monkeypatch.setenv("COCODIFF_PROBE", value)
    assert probe_wanted() == wanted


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCODIFF_PROBE", "maybe")
    with pytest.raises(ValueError, match="COCODIFF_PROBE is 'maybe'; allowed: 0"):
        probe_wanted()
