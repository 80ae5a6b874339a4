# SPDX-License-Identifier: Apache-2.0
"""select-v-major: what arrives is what the contract says, exchange by exchange, step by step.

Three proofs for every lossy kind of step, on ranks of a 2x3 grid with other data each:

    results     those of the captured graph whose exchanges carry what `code_by_contract` makes of
                what was packed, but for float error
    all else    the captured graph with these results gives the same to the bit
    memories    of sender and receiver are the same to the bit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cocodiff_compile.ir.aten import ALL_TO_ALL, bound, size_bytes
from cocodiff_compile.v_major.delta_code import BITS, FULL, SCALE_BITS, distortion, num_words
from cocodiff_compile.v_major.payload import UNCOMPRESSED, Payload
from tests.support.lockstep import equal_on_every_rank
from tests.support.selective import (
    MIXED,
    NUM_RANKS,
    Captured,
    Selective,
    Step,
    code_by_contract,
    differing_share,
    every_model,
    exchanged,
    idiom,
    in_chunks,
    kinds_of_models,
    model,
    num_gathers,
    same,
    usual_energy,
    with_broken_element,
)

INTRA = Payload.uniform(8, is_intra_coded=True)
LEANING = Payload.uniform(4)
"""Needs what steps before it leave."""
INF = float("inf")

pytestmark = pytest.mark.usefixtures("without_gradients")

# All uncompressed


@every_model
def test_uncompressed_every_value_is_captured_bit_for_bit(name: str) -> None:
    selective = Selective(model(name), UNCOMPRESSED, Payload.uniform(4), measures_drift=True)
    for inputs in selective.base.inputs(3):
        ours, exact = selective.step(UNCOMPRESSED, inputs), selective.exact(inputs)
        assert equal_on_every_rank(ours.outputs, exact.outputs)
        assert same(ours.results, exact.results)
        assert not any(mine[-1].any() for mine in selective.caches), "nothing is lost"


@every_model
def test_uncompressed_both_sides_cache_what_was_sent(name: str) -> None:
    selective = Selective(model(name), UNCOMPRESSED, Payload.uniform(4))
    for inputs in selective.base.inputs(2):
        step = selective.step(UNCOMPRESSED, inputs)
        for packed, pairs in zip(step.packed, selective.pairs(), strict=True):
            for message, received, (sent, held) in zip(
                packed, exchanged(packed), pairs, strict=True
            ):
                assert torch.equal(sent.flatten(), message.flatten())
                assert torch.equal(held.flatten(), received.flatten())


# Coded


def expected_messages(
    step: Step, selective: Selective, payload: Payload, caches: list[list[Tensor]]
) -> list[list[Tensor]]:
    """Returns what arrives of what was packed, by piece and rank; updates the senders' `caches`."""
    found = []
    all_bits, groups = bits_of_pieces(selective.base, payload), selective.base.groups()
    for place, (packed, bits, group) in enumerate(zip(step.packed, all_bits, groups, strict=True)):
        if bits == FULL:
            caches[place] = [message.clone() for message in packed]
            found.append(packed)
            continue
        coded = [
            code_by_contract(message, cache, bits, group, payload.is_intra_coded)
            for message, cache in zip(packed, caches[place], strict=True)
        ]
        caches[place] = [expected for expected, _ in coded]
        found.append([arrived.view_as(packed[0]) for _, arrived in coded])
    return found


def bits_of_pieces(base: Captured, payload: Payload) -> list[int]:
    """Returns the last role of an exchange: roles that are sent together ask for the same."""
    bits = {
        leg.exchange.start: payload.bits_of()[leg.role]
        for site in base.found.sites
        for leg in site.legs
    }
    return [
        bits[exchange.start]
        for site in base.found.sites
        for exchange in site.exchanges
        for _ in exchange.pieces
    ]


def assert_by_contract(selective: Selective, *kinds: Payload) -> None:
    """Steps of these kinds, the first of them after nothing was sent; the last one is lossy."""
    caches = _nothing_sent(selective)
    for kind, inputs in zip(kinds, selective.base.inputs(len(kinds)), strict=True):
        step = selective.step(kind, inputs)
        messages = expected_messages(step, selective, kind, caches)
        expected = selective.with_messages(inputs, messages)
        for ours, theirs in zip(step.results, expected.results, strict=True):
            assert differing_share(ours, theirs) < 0.001
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)
        assert same(step.packed, rest.packed)
    assert not equal_on_every_rank(step.outputs, selective.exact(inputs).outputs), "it is lossy"


@kinds_of_models(*map(Payload.uniform, (8, 4, 2)), MIXED)
def test_coded_exchanges_give_what_the_contract_says(name: str, payload: Payload) -> None:
    assert_by_contract(
        Selective(model(name), UNCOMPRESSED, payload), UNCOMPRESSED, payload, payload
    )


def _nothing_sent(selective: Selective) -> list[list[Tensor]]:
    """Memories of senders before the first step, by piece and rank."""
    packed = [bound(piece.start)["input"].meta["val"] for piece in selective.base.pieces]
    return [[torch.zeros(fake.shape, dtype=fake.dtype)] * NUM_RANKS for fake in packed]


@pytest.mark.parametrize("bits", BITS)
def test_a_first_coded_step_without_an_uncompressed_one_gives_what_the_contract_says(
    bits: int,
) -> None:
    """Against memories of zeros, the difference is all."""
    payload = Payload.uniform(bits)
    assert_by_contract(Selective(model("sd3"), payload), payload)


@pytest.mark.parametrize(("name", "bits"), [("flux", 1), ("sd3", 8)])
def test_sender_and_receiver_cache_the_same_to_the_bit(name: str, bits: int) -> None:
    payload = Payload.uniform(bits)
    selective = Selective(model(name), UNCOMPRESSED, payload)
    kinds = (UNCOMPRESSED, payload, payload, payload)
    for kind, inputs in zip(kinds, selective.base.inputs(4, change=0.5), strict=True):
        selective.step(kind, inputs)
        assert both_sides_remember_the_same(selective)


def both_sides_remember_the_same(selective: Selective) -> bool:
    pairs = selective.pairs()
    held = [[item for _, item in mine] for mine in pairs]
    return same(held, [exchanged([sent for sent, _ in mine]) for mine in pairs])


def test_the_same_input_again_and_again_gives_the_exact_output_in_the_end() -> None:
    payload = Payload.uniform(4)
    selective = Selective(model("sd3"), payload)
    (inputs,) = selective.base.inputs(1)
    exact = selective.exact(inputs).outputs
    apart = [_largest_difference(selective.step(payload, inputs).outputs, exact) for _ in range(15)]
    assert apart[-1] < apart[0] / 30


def _largest_difference(ours: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]) -> Any:
    return max(
        float((mine - other).abs().max())
        for own, others in zip(ours, exact, strict=True)
        for mine, other in zip(own, others, strict=True)
    )


@kinds_of_models(*map(Payload.uniform, BITS), INTRA, MIXED)
def test_bytes_are_those_of_bits_of_scales_per_head_of_a_token_and_of_spreads(
    name: str, payload: Payload
) -> None:
    base = model(name)
    selective = Selective(base, payload, LEANING)
    graph = selective.variants[payload].graph
    starts = graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    recognition = selective.results[payload].recognition
    assert recognition is not None
    pieces = [piece for site in recognition.sites for piece in site.pieces]
    assert {piece.start for piece in pieces} == set(starts)
    assert num_gathers(graph) == num_gathers(base.graph)
    for before, after, bits, group in zip(
        base.pieces, pieces, bits_of_pieces(base, payload), base.groups(), strict=True
    ):
        elements = bound(before.start)["input"].meta["val"].numel()
        scales = 4 * NUM_RANKS * num_words(elements // group // NUM_RANKS, SCALE_BITS)
        coded = elements * bits // 8 + scales + NUM_RANKS * group
        sent = size_bytes(bound(after.start)["input"])
        assert sent == after.size_bytes == (coded if bits != FULL else before.size_bytes)


def test_one_exchange_of_several_roles_takes_the_most_that_any_asks_for() -> None:
    base = idiom("packed by stack")
    (site,) = base.found.sites
    assert len(site.exchanges) == 2
    for bits, expected in (((2, 4, 3, 8), 4), ((1, 8, 2, 4), 8), ((2, FULL, 8, 4), FULL)):
        selective = Selective(base, Payload(bits), UNCOMPRESSED, Payload.uniform(4))
        recognition = selective.results[Payload(bits)].recognition
        assert recognition is not None
        before, after = base.pieces[0], recognition.sites[0].q.exchange
        elements = bound(before.start)["input"].meta["val"].numel()
        scales = 4 * NUM_RANKS * num_words(elements // 8 // NUM_RANKS, SCALE_BITS)
        coded = elements // 8 * expected + scales + NUM_RANKS * 8
        assert after.size_bytes == (before.size_bytes if expected == FULL else coded)


SPELLINGS = (
    "bf16",
    "head first, one sample",
    "transposed in place",
    "packed by cat of sizes",
    "key is value",
    "heads padded as first dim",
    "rows dropped by block, packed by stack",
)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_ulysses_gives_what_the_contract_says(name: str) -> None:
    """Uncompressed steps equal the contract to the bit, steps in three bits but for float error:
    with few digits, as in bfloat16, some differences lie between two numbers, where either is
    right.
    """
    payload, intra = Payload.uniform(3), Payload.uniform(3, is_intra_coded=True)
    kinds = (UNCOMPRESSED, payload, payload, intra, payload)
    selective = Selective(idiom(name), UNCOMPRESSED, payload, intra)
    caches = _nothing_sent(selective)
    for kind, inputs in zip(kinds, selective.base.inputs(5), strict=True):
        step = selective.step(kind, inputs)
        messages = expected_messages(step, selective, kind, caches)
        expected = selective.with_messages(inputs, messages)
        for ours, theirs in zip(step.results, expected.results, strict=True):
            assert differing_share(ours, theirs) <= (0 if kind.is_uncompressed else 0.02)
        rest = selective.with_results(inputs, step.results)
        assert equal_on_every_rank(step.outputs, rest.outputs)


@kinds_of_models(Payload.uniform(2), INTRA, MIXED)
def test_chunks_of_heads_give_what_the_contract_says(name: str, payload: Payload) -> None:
    """Each is a message with spreads of its own."""
    chunked = Selective(in_chunks(name), UNCOMPRESSED, payload, LEANING)
    assert len(chunked.base.pieces) == 2 * len(model(name).pieces)
    assert_by_contract(chunked, UNCOMPRESSED, payload, payload)


# Anew


@kinds_of_models(
    INTRA, Payload.uniform(2, is_intra_coded=True), replace(MIXED, is_intra_coded=True)
)
def test_intra_coded_exchanges_give_what_the_contract_says(name: str, payload: Payload) -> None:
    """The contract also holds for steps that need what these leave, and for these after others."""
    selective = Selective(model(name), payload, LEANING)
    assert_by_contract(selective, payload, LEANING, LEANING, payload)


@pytest.mark.parametrize("bits", BITS)
def test_every_number_of_bits_is_intra_coded_by_the_contract(bits: int) -> None:
    payload = Payload.uniform(bits, is_intra_coded=True)
    assert_by_contract(Selective(model("sd3"), payload, LEANING), payload, LEANING, payload)


@pytest.mark.parametrize(("name", "bits"), [("flux", 1), ("sd3", 8)])
def test_intra_coded_both_sides_cache_what_arrived_to_the_bit(name: str, bits: int) -> None:
    """An intra-coded step has the results of an exchange of what the senders cache."""
    intra = Payload.uniform(bits, is_intra_coded=True)
    selective = Selective(model(name), intra, LEANING)
    kinds = (intra, LEANING, intra, LEANING)
    for kind, inputs in zip(kinds, selective.base.inputs(4, change=0.5), strict=True):
        step = selective.step(kind, inputs)
        assert both_sides_remember_the_same(selective)
        messages = [
            [sent.view_as(message) for (sent, _), message in zip(pairs, packed, strict=True)]
            for pairs, packed in zip(selective.pairs(), step.packed, strict=True)
        ]
        results = selective.with_messages(inputs, messages).results
        assert same(step.results, results) == kind.is_intra_coded, (
            "otherwise the cache is extrapolated"
        )


def _fill_with_garbage(selective: Selective) -> None:
    """Other on every rank, and other of what was sent than of what is held."""
    noise = torch.Generator().manual_seed(7)
    for mine in selective.caches:
        for place, cache in enumerate(mine):
            cache.copy_(1000 * torch.randn(cache.shape, generator=noise))
            cache.view(-1)[::7] = (INF, -INF, float("nan"))[place % 3]


@kinds_of_models(Payload.uniform(1, is_intra_coded=True), INTRA)
def test_an_intra_coded_step_is_the_same_whatever_was_cached_before(
    name: str, payload: Payload
) -> None:
    """All steps after the intra-coded one are the same, too."""
    fresh, other = (Selective(model(name), payload, LEANING, measures_drift=True) for _ in range(2))
    _fill_with_garbage(other)
    for kind, inputs in zip((payload, LEANING), fresh.base.inputs(2), strict=True):
        ours, theirs = other.step(kind, inputs), fresh.step(kind, inputs)
        assert equal_on_every_rank(ours.outputs, theirs.outputs)
        assert same(ours.results, theirs.results)
        assert same(other.caches, fresh.caches)


def test_an_intra_coded_step_has_a_drift_of_its_own() -> None:
    """The drift is what the code lost of the values, whatever was cached before."""
    selective = Selective(model("sd3"), INTRA, LEANING, measures_drift=True)
    _fill_with_garbage(selective)
    for kind, inputs in zip((INTRA, LEANING, INTRA), selective.base.inputs(3), strict=True):
        selective.step(kind, inputs)
        for mine in selective.caches:
            mean, worst = mine[-1][:2].tolist()
            assert 0 < mean < worst < 0.01
            assert mean < 3 * distortion(8) or not kind.is_intra_coded


@pytest.mark.parametrize("payload", [INTRA, LEANING], ids=str)
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_the_drift_is_unknown_if_anything_that_was_sent_is_not_finite(
    payload: Payload, value: float
) -> None:
    """The drift is NaN on the rank that sent the value, from which the others hear of it."""
    selective = Selective(model("sd3"), UNCOMPRESSED, payload, LEANING, measures_drift=True)
    first, second = selective.base.inputs(2)
    selective.step(UNCOMPRESSED, first)
    selective.step(payload, with_broken_element(second, selective.base.names, value))
    assert selective.caches[2][-1][:2].isnan().all()


def test_intra_coded_a_group_that_is_not_finite_leaves_zeros_on_both_sides() -> None:
    """Other groups are unharmed. Only the first exchanges are compared, which no other precedes."""
    clean, holed = (Selective(model("sd3"), INTRA, LEANING) for _ in range(2))
    _fill_with_garbage(holed)
    (inputs,) = clean.base.inputs(1)
    clean.step(INTRA, inputs)
    step = holed.step(INTRA, with_broken_element(inputs, clean.base.names, float("nan")))
    assert both_sides_remember_the_same(holed)
    for piece in range(3):
        ours, theirs = holed.pairs()[piece], clean.pairs()[piece]
        for rank, ((sent, _), (expected, _)) in enumerate(zip(ours, theirs, strict=True)):
            is_none = ~step.packed[piece][rank].view_as(sent).isfinite().all(-1, keepdim=True)
            assert bool(is_none.any()) == (rank == 2)
            assert (sent[is_none.expand_as(sent)] == 0).all()
            mended = torch.where(is_none, 0.0, expected)
            torch.testing.assert_close(sent, mended, atol=0.05, rtol=0.02)


# Drift


@pytest.mark.parametrize(("name", "bits"), [("flux", 2), ("sd3", 8)])
def test_drift_is_the_share_of_energy_that_a_head_of_a_token_lost_mean_and_worst(
    name: str, bits: int
) -> None:
    payload = Payload.uniform(bits)
    selective = Selective(model(name), UNCOMPRESSED, payload, measures_drift=True)
    kinds = (UNCOMPRESSED, payload, payload, UNCOMPRESSED)
    caches = _nothing_sent(selective)
    for kind, inputs in zip(kinds, selective.base.inputs(4), strict=True):
        step = selective.step(kind, inputs)
        messages = expected_messages(step, selective, kind, caches)
        for rank, mine in enumerate(selective.caches):
            pairs = zip(step.packed, messages, strict=True)
            lost = [
                _lost_shares(packed[rank], arrived[rank], group)
                for (packed, arrived), group in zip(pairs, selective.base.groups(), strict=True)
            ]
            assert mine[-1].dtype == torch.float32
            mean, worst, *means = mine[-1].tolist()
            assert means == pytest.approx([float(item.mean()) for item in lost], 0.01)
            assert mean == pytest.approx(sum(float(item.mean()) for item in lost) / len(lost), 0.01)
            assert worst == pytest.approx(max(float(item.max()) for item in lost), 0.01)
            assert (mean == 0) == kind.is_uncompressed


def _lost_shares(packed: Tensor, arrived: Tensor, group: int) -> Tensor:
    """Returns the share of energy that each group lost. A small group counts as if it had an eighth
    of the usual size.
    """
    shape = (NUM_RANKS, -1, group)
    exact = packed.double().reshape(shape)
    size = exact.square().mean(-1)
    lost = (exact - arrived.double().reshape(shape)).square().mean(-1)
    usual = torch.stack([usual_energy(mine) for mine in size]).unsqueeze(-1)
    return lost / torch.maximum(size, usual / 64)


def test_measuring_changes_nothing_else() -> None:
    payload = Payload.uniform(2)
    plain = Selective(model("sd3"), UNCOMPRESSED, payload)
    measuring = Selective(model("sd3"), UNCOMPRESSED, payload, measures_drift=True)
    assert len(measuring.caches[0]) == len(plain.caches[0]) + 1
    for kind, inputs in zip((UNCOMPRESSED, payload), plain.base.inputs(2), strict=True):
        ours, theirs = measuring.step(kind, inputs), plain.step(kind, inputs)
        assert equal_on_every_rank(ours.outputs, theirs.outputs)


# Not finite


@pytest.mark.parametrize(
    ("name", "first", "payload"),
    [
        ("flux", UNCOMPRESSED, Payload.uniform(2)),
        ("sd3", UNCOMPRESSED, MIXED),
        ("sd3", INTRA, Payload.uniform(2)),
        ("sd3", replace(MIXED, is_intra_coded=True), MIXED),
    ],
    ids=str,
)
@pytest.mark.parametrize(("value", "broken"), [(float("nan"), 0), (float("nan"), 1), (INF, 1)])
def test_what_is_not_finite_arrives_and_is_gone_a_step_later(
    name: str, first: Payload, payload: Payload, value: float, broken: int
) -> None:
    """The value occurs in a keyframe or in a step that is coded as differences."""
    selective = Selective(model(name), first, payload)
    kinds = (first, payload, payload)
    for number, (kind, inputs) in enumerate(zip(kinds, selective.base.inputs(3), strict=True)):
        given = (
            with_broken_element(inputs, selective.base.names, value) if number == broken else inputs
        )
        step, exact = selective.step(kind, given), selective.exact(given)
        assert all(cache.isfinite().all() for mine in selective.caches for cache in mine)
        for ours, theirs in zip(step.outputs, exact.outputs, strict=True):
            assert ours[0].isnan()[theirs[0].isnan()].all()
            assert ours[0].isfinite().all() == (number != broken)
        assert any(item[0].isnan().any() for item in exact.outputs) == (number == broken)


@pytest.mark.parametrize("payload", [LEANING, INTRA], ids=str)
def test_groups_that_are_finite_arrive_by_the_contract_beside_others(payload: Payload) -> None:
    """Only the first three exchanges are compared, as no other one comes before them."""
    selective = Selective(model("sd3"), UNCOMPRESSED, payload, LEANING)
    caches = _nothing_sent(selective)
    first, second = selective.base.inputs(2)
    expected_messages(selective.step(UNCOMPRESSED, first), selective, UNCOMPRESSED, caches)
    broken = with_broken_element(second, selective.base.names, float("nan"))
    step = selective.step(payload, broken)
    messages = expected_messages(step, selective, payload, caches)
    expected = selective.with_messages(broken, messages)
    for piece in range(3):
        ours, theirs = step.results[piece], expected.results[piece]
        assert all(0 < mine.isnan().float().mean() < 0.5 for mine in ours)
        assert differing_share(ours, theirs) <= 0.001
