# SPDX-License-Identifier: Apache-2.0
"""Exchanges are coded only where that saves more time on the links than it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cocodiff_compile.cost.costs import Costs
from cocodiff_compile.decide.coded_attentions import choose_uncoded
from cocodiff_compile.decide.coding_worth import CodingWorth
from cocodiff_compile.devices.device import Device
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.passes.select_v_major import SelectVMajor
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.machine import sketch_machine
from cocodiff_compile.v_major.delta_code import FULL
from cocodiff_compile.v_major.payload import CachedRoles, Payload
from tests.support.captured import fake_ranks
from tests.support.selective import NUM_RANKS, Captured, small_model

CODED = Payload.uniform(4)
BREAK_EVEN_BYTES_PER_S = 4 * 5 / 6 * (1 - 5 / 32) / 32e-9
"""Bandwidth at which coding takes as long as it saves. Of the 4 bytes of a float32 element, 5/6 go
to other ranks. Coded in 4 bits, with a byte per 8 elements, 5/32 of these are left. Coding an
element takes 32 ns on a device that moves a byte in 1 ns.
"""


def worth(bytes_per_s: float, group: str = "0", usual: Payload = CODED) -> CodingWorth:
    link = Link("wire", bytes_per_s, 2 * bytes_per_s, 0.0)
    topology = Topology("six", (Axis("node", NUM_RANKS, link),), 1e15)
    device = Device("test", 1e12, 1e9, 1.0, 1.0, 1.0, 0.0)
    return CodingWorth(Costs(device, {group: sketch_machine(topology)}, "off"), usual)


def run(base: Captured, worth: CodingWorth, budget_bytes: float | None = None) -> PassResult:
    own = base.copy()
    how = SelectVMajor(CODED, CachedRoles.for_payloads([CODED]))
    how = replace(how, uncoded=choose_uncoded(how, own.found, budget_bytes, worth))
    with fake_ranks(NUM_RANKS):
        result = how.run(own.graph, own.found)
        assert result.changed == how.rewrites_any(base.found)
    return result


@pytest.mark.parametrize("name", ["flux", "sd3"])
@pytest.mark.parametrize(("factor", "pays"), [(0.8, True), (1.25, False)])
def test_an_attention_is_coded_where_the_links_are_slower_than_coding(
    name: str, factor: float, pays: bool
) -> None:
    base = small_model(name, 8)
    result = run(base, worth(factor * BREAK_EVEN_BYTES_PER_S))
    assert result.changed == pays
    if not pays:
        assert len(result.declined) == len(base.found.sites)
        assert all("would take" in item.reason for item in result.declined)
        assert all("'only_if_faster': False" in item.reason for item in result.declined)


def test_what_stays_uncompressed_neither_takes_nor_saves() -> None:
    """Two of four exchanges are coded, and each of them breaks even by itself."""
    some = Payload((FULL, FULL, 4, 4))
    site = small_model("sd3", 8).found.sites[0]
    assert worth(0.8 * BREAK_EVEN_BYTES_PER_S, usual=some).why_not(site) == ""
    assert worth(1.25 * BREAK_EVEN_BYTES_PER_S, usual=some).why_not(site)


def test_tokens_that_are_skipped_save_as_well() -> None:
    """Half of 4 bytes for Q, K and V: less than 4 bits of each save, and of O nothing."""
    site = small_model("sd3", 8).found.sites[0]
    half = replace(Payload.uniform(FULL), skipped_share=0.5)
    assert worth(0.5 * BREAK_EVEN_BYTES_PER_S, usual=half).why_not(site) == ""
    assert worth(0.8 * BREAK_EVEN_BYTES_PER_S, usual=half).why_not(site)


def test_where_costs_are_unknown_it_is_taken_to_pay() -> None:
    site = small_model("sd3", 8).found.sites[0]
    assert worth(1e15, group="another").why_not(site) == ""


def test_what_gains_nothing_takes_no_room() -> None:
    """A budget for one attention goes to one that coding makes faster, if there is any."""
    base = small_model("flux", 8)
    gaining = worth(0.8 * BREAK_EVEN_BYTES_PER_S)
    whole = run(base, gaining).declined
    assert whole == ()
    sizes = [sum(int(item.size_bytes) for item in site.exchanges) for site in base.found.sites]
    result = run(base, gaining, budget_bytes=2 * max(sizes))
    assert [item.reason[:17] for item in result.declined] == ["its caches exceed"] * (
        len(sizes) - 1
    )
    nothing = run(base, worth(1e15), budget_bytes=2 * max(sizes))
    assert all("would take" in item.reason for item in nothing.declined)
