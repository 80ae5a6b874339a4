# SPDX-License-Identifier: Apache-2.0
"""Axes from where ranks say they run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.devices.xpu import XPU
from cocodiff_compile.ranks.detect import (
    MAX_AXES,
    RankLocation,
    detect,
    location_of_this_rank,
    near_square_factor,
    split_axes,
)
from cocodiff_compile.topology.axes import Axis
from cocodiff_compile.topology.presets import ANY, SLINGSHOT, TILE, XE_LINK


def _sizes(places: list[RankLocation]) -> dict[str, int]:
    return {axis.name: axis.size for axis in detect(places).topology.axes}


def _hosts(text: str) -> list[RankLocation]:
    return [RankLocation(host) for host in text]


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        ("aaaa", {"local.inner": 2, "local.outer": 2}),
        ("a" * 8, {"local.inner": 2, "local.outer": 4}),
        ("a" * 12, {"local.inner": 3, "local.outer": 4}),
        ("a" * 24, {"local.inner": 4, "local.outer": 6}),
        ("a" * 7, {"local": 7}),
        ("aabb", {"local": 2, "node": 2}),
        ("aaabbb", {"local": 3, "node": 2}),
        ("aaaabbbb", {"local.inner": 2, "local.outer": 2, "node": 2}),
        ("abcdef", {"node.inner": 2, "node.outer": 3}),
        ("aabbccdd", {"local": 2, "node.inner": 2, "node.outer": 2}),
        ("aaaabbbbccccddddeeeeffff", {"local": 4, "node.inner": 2, "node.outer": 3}),
        ("aaaabbbbccccdddd", {"local.inner": 2, "local.outer": 2, "node": 4}),
    ],
)
def test_hosts_become_axes(hosts: str, sizes: dict[str, int]) -> None:
    assert _sizes(_hosts(hosts)) == sizes
    assert detect(_hosts(hosts)).reasons == ()


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("abab", "hosts are interleaved: 'a' has ranks 0, 2"),
        ("aaab", "hosts have different numbers of ranks: 'a' 3, 'b' 1"),
    ],
)
def test_hosts_that_are_no_axis_are_one_with_the_reason(hosts: str, reason: str) -> None:
    detected = detect(_hosts(hosts))
    assert _sizes(_hosts(hosts)) == {"rank.inner": 2, "rank.outer": 2}
    assert detected.reasons == (f"{reason}; ranks form one axis",)


def _xpu(host: str, card: str) -> RankLocation:
    return RankLocation(host, "xpu", "Intel(R) Data Center GPU Max 1550", card)


def test_tiles_of_a_card_are_an_axis_and_links_those_of_the_preset() -> None:
    places = [_xpu(host, str(card)) for host in "ab" for card in range(6) for _ in range(2)]
    topology = detect(places).topology
    assert topology.axes == (
        Axis("tile", 2, TILE),
        Axis("gpu", 6, XE_LINK),
        Axis("node", 2, SLINGSHOT),
    )


@pytest.mark.parametrize(
    ("cards", "reason"),
    [("0101", "cards are interleaved"), ("0001", "cards have different numbers of ranks")],
)
def test_cards_that_are_no_axis_are_left_out_with_the_reason(cards: str, reason: str) -> None:
    detected = detect([_xpu("a", card) for card in cards])
    assert [axis.name for axis in detected.topology.axes] == ["gpu.inner", "gpu.outer"]
    assert reason in detected.reasons[0]


def test_one_card_per_rank_and_unknown_cards_are_no_tiles() -> None:
    assert _sizes([RankLocation("a", "cuda", "H100", str(n)) for n in range(2)]) == {"gpu": 2}
    assert _sizes([RankLocation("a", "cuda", "H100", "") for _ in range(2)]) == {"gpu": 2}


@given(st.lists(st.integers(2, 40), min_size=1, max_size=3))
def test_splitting_keeps_order_links_and_the_number_of_ranks(sizes: list[int]) -> None:
    axes = [Axis(f"a{n}", size, ANY) for n, size in enumerate(sizes)]
    split = split_axes(axes)
    assert math.prod(axis.size for axis in split) == math.prod(sizes)
    assert len(split) <= MAX_AXES
    assert [axis.name.split(".")[0] for axis in split] == sorted(
        axis.name.split(".")[0] for axis in split
    )
    for axis in split:
        assert axis.size > 1 and axis.link is ANY


@given(st.integers(1, 500))
def test_the_near_square_factor_is_the_best_one(number: int) -> None:
    inner = near_square_factor(number)
    outer = number // inner
    assert inner * outer == number and inner <= outer
    for factor in range(1, number + 1):
        if number % factor == 0:
            assert inner + outer <= factor + number // factor


def test_this_rank_is_on_its_host_and_torchruns_agents_are_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    alone = location_of_this_rank(torch.device("cpu"))
    assert alone.host and (alone.device_type, alone.card) == ("cpu", "")
    monkeypatch.setenv("GROUP_RANK", "3")
    assert location_of_this_rank(torch.device("cpu")).host == f"{alone.host}/3"


def test_the_tiles_of_an_xpu_differ_in_the_last_byte_of_the_uuid_only() -> None:
    """The layout that Intel's driver documents; no XPU was asked."""
    uuid = bytes.fromhex("8680d50b2f000000180001000000000001")
    first, second = uuid[:15] + b"\x01", uuid[:15] + b"\x02"
    other = uuid[:8] + b"\x29" + uuid[9:15] + b"\x01"

    def card(uuid: object) -> str:
        return XPU.card_of(SimpleNamespace(uuid=uuid))

    assert card(first) == card(second) == card(SimpleNamespace(bytes=first)) != card(other)
    assert card(bytes(16)) == ""
