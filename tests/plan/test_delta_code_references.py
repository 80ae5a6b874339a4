# SPDX-License-Identifier: Apache-2.0
"""Coded differences: what arrives from step to step, and what both sides remember."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.v_major.delta_code import (
    BITS,
    EXTRAPOLATION,
    NOT_FINITE,
    SCALE_BITS,
    code_bits,
    distortion,
    finite_or,
    lost_shares,
    normalize,
    num_words,
    send,
    spread_code,
    update,
)
from tests.support.coded import (
    DTYPES,
    IS_BROKEN,
    any_group,
    decode_message,
    encode_spread,
    every_bits,
    every_dtype,
    every_group,
    exchange,
    normal,
    reference_and_values,
    send_often,
    spreads_of_codes,
    with_broken_groups,
)


def words_of(values: Tensor, reference: Tensor, bits: int, is_intra_coded: bool = False) -> Tensor:
    """Returns what is sent, as whole numbers."""
    return send(values, reference, bits, is_intra_coded)[0].view(torch.int32)


# Spreads


@every_bits
def test_places_that_change_little_are_coded_as_well_as_those_that_change_much(bits: int) -> None:
    """Relative to how much they change: without spreads the small ones would be lost."""
    sizes = torch.exp2(-torch.arange(32.0))[:16].repeat(2)
    values = normal(2, 500, 32) * sizes
    _, arrived = exchange(torch.zeros_like(values), values, bits)
    lost = (values - arrived).square().mean((0, 1)) / sizes**2
    assert float(lost.max()) < 1.6 * distortion(bits) + 1e-4
    assert float(lost.max() / lost.min()) < 3


def test_ranks_have_spreads_of_their_own() -> None:
    values = normal(2, 100, 8)
    values[0, :, 3] *= 100
    apart = spread_code(normalize(values))
    assert torch.equal(apart[1:], spread_code(normalize(values[1:])))
    assert apart[0, 0, 3] > apart[0, 0, 2] + 6 * 8, "64 times larger and more"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_what_is_not_finite_has_no_part_in_spreads(value: float) -> None:
    values = normal(1, 40, 8)
    without = values.clone()
    without[0, 7] = 0.0
    values[0, 7, 2] = value
    values[0, 7, :2] = values[0, 7, 3:] = 0.0
    assert torch.equal(spread_code(normalize(values)), spread_code(normalize(without)))
    assert torch.equal(spread_code(normalize(torch.zeros(1, 4, 8))), torch.zeros(1, 1, 8))


# Memories


@every_bits
@every_dtype
def test_the_difference_to_the_reference_is_sent(bits: int, dtype: torch.dtype) -> None:
    reference, values = reference_and_values(32, dtype)
    message = words_of(values, reference, bits)
    assert 32 * message.shape[1] == 32 * code_bits(bits, 24) + 8 * 24
    difference = values.float() - reference.float()
    spread = spread_code(normalize(difference))
    assert torch.equal(decode_message(message, values.shape, bits)[2], spread)
    assert torch.equal(message[:, : -24 // 4], encode_spread(difference, spread, bits))


def test_spreads_are_those_of_places_over_the_mean() -> None:
    sizes = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(4)
    spread = spreads_of_codes(spread_code(normalize(normal(1, 5000, 16) * sizes)))[0, 0]
    assert float(spread.square().mean()) == pytest.approx(1, rel=0.2)
    torch.testing.assert_close(spread / spread[0], sizes.double(), rtol=0.3, atol=0)


@every_bits
@every_dtype
def test_what_arrives_is_the_reference_and_the_difference_rounded_once(
    bits: int, dtype: torch.dtype
) -> None:
    """Both sides then remember an extrapolation, by 1 + EXTRAPOLATION times the difference."""
    reference = normal(2, 30, 24, seed=1).to(dtype)
    message, _, _ = send(normal(2, 30, 24, seed=2), torch.zeros(2, 30, 24), bits)
    difference = decode_message(message, (2, 30, 24), bits)[0].double()
    expected_next, arrived = update(reference, message, bits)
    assert torch.equal(arrived, (reference.double() + difference).float().to(dtype))
    expected = reference.double() + (1 + EXTRAPOLATION) * difference
    assert torch.equal(expected_next, expected.float().to(dtype))
    assert expected_next.dtype == arrived.dtype == dtype


def test_a_steady_change_is_expected() -> None:
    """The difference settles at 1 / (1 + EXTRAPOLATION) of the change: references run ahead."""
    change, reference = normal(1, 20, 64), torch.zeros(1, 20, 64)
    for step in range(20):
        values = step * change
        difference = values - reference
        reference, _ = exchange(reference, values, 8)
    torch.testing.assert_close(difference, change / (1 + EXTRAPOLATION), atol=0.05, rtol=0)


@every_bits
@every_dtype
@every_group
def test_sender_and_receiver_cache_the_same_to_the_bit(
    bits: int, dtype: torch.dtype, group: int
) -> None:
    """The receiver sees bytes only, one rank's row at a time; not a bit is apart after many."""
    sent = torch.zeros(2, 10, group, dtype=dtype)
    held = [torch.zeros(1, 10, group, dtype=dtype) for _ in range(2)]
    for step in range(8):
        values = (normal(2, 10, group, seed=step) * 3**step).to(dtype)
        coded, sent, _ = send(values, sent, bits)
        held = [update(held[rank], coded[rank : rank + 1], bits)[0] for rank in range(2)]
        assert torch.equal(torch.cat(held), sent)


@every_bits
@pytest.mark.parametrize(("dtype", "closest"), [(torch.float32, 2**-21), (torch.float16, 2**-8)])
def test_the_same_value_again_and_again_arrives_in_the_end(
    bits: int, dtype: torch.dtype, closest: float
) -> None:
    """The error of one send is part of the next difference; a group with outliers takes some more
    sends. With 2 bits, some values are overshot from alternating sides and come no closer.
    """
    values = normal(2, 20, 32)
    values[:, ::4, 3] = 20.0
    values = values.to(dtype)
    off = (send_often(values, bits, 150).float() - values.float()).abs()
    first = (send_often(values, bits, 1).float() - values.float()).abs()
    assert first.max() > 4 * closest
    widest = 32**0.5  # the spread of a place that alone changes: its steps are as much larger
    in_the_end = first.max() / 100 if bits == 2 else widest * closest * (8 if bits == 1 else 4)
    assert off.max() <= in_the_end


@every_bits
def test_errors_do_not_add_up_over_changing_values(bits: int) -> None:
    """A walk of 100 steps that change every element by 1: a difference is that change, what the
    last one left, and what was wrongly expected.
    """
    values, reference, lost = torch.zeros(1, 64, 64), torch.zeros(1, 64, 64), []
    for step in range(100):
        values = values + normal(1, 64, 64, seed=step)
        reference, arrived = exchange(reference, values, bits)
        lost.append(float((values - arrived).square().mean()))
    of_one = distortion(bits) / ((1 - EXTRAPOLATION**2) * (1 - distortion(bits)))
    assert sum(lost[-20:]) / 20 <= 1.5 * of_one


@every_bits
@every_dtype
def test_what_does_not_differ_arrives_exactly(bits: int, dtype: torch.dtype) -> None:
    """Groups that do not differ arrive exactly beside others that do, and after any number of
    sends. So do zeros at a receiver that remembers nothing.
    """
    reference, values = reference_and_values(6, dtype)
    values[:, 1::2] = reference[:, 1::2]
    kept = reference
    for _ in range(3):
        reference, arrived = exchange(reference, values, bits)
        for ours in (reference, arrived):
            assert torch.equal(ours[:, 1::2], kept[:, 1::2])
        assert not torch.equal(arrived[:, ::2], values[:, ::2])
    for times in (1, 2, 20):
        assert not send_often(torch.zeros_like(values), bits, times).any()


@every_bits
def test_a_half_precision_value_near_the_largest_is_never_cached_as_infinite(bits: int) -> None:
    """Half a step too much would be: then every later difference is infinite, and all is NaN."""
    before = torch.full((1, 1, 16), 64000.0, dtype=torch.float16)
    values = before.clone()
    values[..., 8:] = 0
    values[..., :8] = 65400
    reference = before
    for _ in range(3):
        reference, arrived = exchange(reference, values, bits)
        assert reference.isfinite().all()
        assert arrived.isfinite().all()


# Anew


def garbage(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns what memory may hold before it is written to: huge numbers, infinities and NaN."""
    found = (1000 * normal(*shape, seed=9)).to(dtype)
    found[:, ::3, ::5] = float("nan")
    found[:, 1::3] = float("inf")
    return found


@every_bits
@every_dtype
def test_intra_coding_sends_the_values_whatever_is_cached(bits: int, dtype: torch.dtype) -> None:
    """Both sides then remember the same, however far apart they were."""
    values = normal(2, 30, 24).to(dtype)
    sent, held = normal(2, 30, 24, seed=1).to(dtype), garbage(2, 30, 24, dtype=dtype)
    coded, expected_next, arriving = send(values, sent, bits, is_intra_coded=True)
    assert torch.equal(coded.view(torch.int32), words_of(values, torch.zeros_like(values), bits))
    assert torch.equal(coded.view(torch.int32), words_of(values, held, bits, is_intra_coded=True))
    theirs, arrived = update(held, coded, bits, is_intra_coded=True)
    assert torch.equal(theirs, expected_next)
    assert torch.equal(arrived, arriving)


@every_bits
@every_dtype
def test_intra_coding_caches_what_arrived(bits: int, dtype: torch.dtype) -> None:
    """Nothing is added ahead: one value does not tell where it goes."""
    values = normal(2, 30, 24).to(dtype)
    message = send(values, torch.zeros_like(values), bits)[0]
    decoded = decode_message(message, (2, 30, 24), bits)[0].to(dtype)
    expected_next, arrived = exchange(torch.ones_like(values), values, bits, is_intra_coded=True)
    assert expected_next.dtype == arrived.dtype == dtype
    assert torch.equal(arrived, decoded)
    assert torch.equal(expected_next, decoded)


@every_bits
def test_after_an_intra_coded_step_the_difference_to_what_was_decoded_is_sent(bits: int) -> None:
    values, later = normal(2, 30, 24), normal(2, 30, 24, seed=1)
    nothing = torch.zeros_like(values)
    decoded = decode_message(send(values, nothing, bits)[0], values.shape, bits)[0]
    reference, _ = exchange(torch.ones_like(values), values, bits, is_intra_coded=True)
    expected = words_of(later - decoded, nothing, bits)
    assert torch.equal(words_of(later, reference, bits), expected)


@every_bits
@every_dtype
def test_intra_coded_a_group_that_is_not_finite_arrives_as_nan_and_leaves_zeros(
    bits: int, dtype: torch.dtype
) -> None:
    """Whatever was remembered of it; other groups are as if it were 0."""
    values, old = normal(2, 6, 24).to(dtype), garbage(2, 6, 24, dtype=dtype)
    expected_next, arrived = exchange(old, with_broken_groups(values), bits, is_intra_coded=True)
    assert arrived[IS_BROKEN].isnan().all()
    assert (expected_next[IS_BROKEN] == 0).all()
    mended = torch.where(IS_BROKEN.unsqueeze(-1), 0.0, values)
    unbroken = exchange(old, mended, bits, is_intra_coded=True)
    for ours, theirs in zip((expected_next, arrived), unbroken, strict=True):
        assert torch.equal(ours[~IS_BROKEN], theirs[~IS_BROKEN])


# What is not finite


@every_bits
@every_dtype
def test_a_group_that_is_not_finite_arrives_as_nan_and_is_not_cached(
    bits: int, dtype: torch.dtype
) -> None:
    reference, values = reference_and_values(6, dtype)
    expected_next, arrived = exchange(reference, with_broken_groups(values), bits)
    assert arrived[IS_BROKEN].isnan().all()
    assert torch.equal(expected_next[IS_BROKEN], reference[IS_BROKEN])


@every_bits
@every_dtype
def test_other_groups_are_not_harmed_by_one_that_is_not_finite(
    bits: int, dtype: torch.dtype
) -> None:
    reference, values = reference_and_values(6, dtype)
    broken = with_broken_groups(values)
    unchanged = exchange(reference, torch.where(IS_BROKEN.unsqueeze(-1), reference, values), bits)
    for ours, theirs in zip(exchange(reference, broken, bits), unchanged, strict=True):
        assert torch.equal(ours[~IS_BROKEN], theirs[~IS_BROKEN])


@every_bits
def test_after_a_group_that_was_not_finite_all_goes_on_as_if_it_had_not_been(bits: int) -> None:
    reference, values = normal(2, 6, 24, seed=1), normal(2, 6, 24, seed=2)
    broken = torch.where(IS_BROKEN.unsqueeze(-1), float("nan"), reference)
    later, _ = exchange(exchange(reference, broken, bits)[0], values, bits)
    direct, _ = exchange(reference, values, bits)
    assert later.isfinite().all()
    assert torch.equal(later[IS_BROKEN], direct[IS_BROKEN])


@every_dtype
def test_of_uncompressed_values_what_is_finite_is_cached(dtype: torch.dtype) -> None:
    values = normal(2, 6, 24).to(dtype)
    assert torch.equal(finite_or(values, 0.0), values)
    broken = with_broken_groups(values)
    assert torch.equal(finite_or(broken, 0.0), torch.where(broken.isfinite(), broken, 0.0))
    assert finite_or(broken, 0.0).dtype == dtype


@every_dtype
def test_what_is_not_finite_leaves_what_was_cached(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    rows, old = torch.tensor([[1.0, nan, inf, -inf], [5.0, 6.0, 7.0, 8.0]], dtype=dtype)
    assert finite_or(rows, old).tolist() == [1.0, 6.0, 7.0, 8.0]
    assert finite_or(rows, old).dtype == dtype


# The loss


def test_the_lost_share_is_energy_lost_over_energy_sent_of_each_group() -> None:
    """The mean share over all groups is returned, and that of the worst group."""
    values = torch.tensor([[[3.0, 4.0], [4.0, 3.0], [6.0, 8.0]]])
    arrived = torch.tensor([[[3.0, 3.0], [4.0, 3.0], [6.0, 6.0]]])
    mean, worst = lost_shares(values, arrived).tolist()
    assert mean == pytest.approx(2 / 75)
    assert worst == pytest.approx(1 / 25)
    assert lost_shares(values, values).tolist() == [0, 0]
    assert lost_shares(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)).tolist() == [0, 0]


@every_bits
def test_the_lost_share_of_a_first_send_is_the_distortion(bits: int) -> None:
    values = normal(2, 2000, 32).bfloat16()
    mean, worst = lost_shares(values, send_often(values, bits, 1)).tolist()
    assert mean == pytest.approx(distortion(bits), rel=0.25)
    assert mean < worst < 10 * mean


# Any values


@settings(max_examples=10)
@given(
    any_group,
    any_group,
    st.sampled_from([bits for bits in BITS if bits != 2]),
    st.sampled_from(DTYPES[:2]),
)
def test_from_any_reference_what_is_sent_again_and_again_comes_closer(
    old: list[float], new: list[float], bits: int, dtype: torch.dtype
) -> None:
    """However far away both are, and whatever is cut off on the way. Not so with 2 bits: elements
    that all differ alike are passed by turns from both sides, and may go farther for a while.
    """
    size = min(len(old), len(new))
    reference = torch.tensor([[old[:size]]], dtype=dtype) / 2**10
    values = torch.tensor([[new[:size]]], dtype=dtype) / 2**10
    first = float((values.float() - reference.float()).abs().max())
    for _ in range(150):
        reference, arrived = exchange(reference, values, bits)
        assert arrived.isfinite().all()
    off = float((values.float() - arrived.float()).abs().max())
    rounding = float(values.abs().max()) * torch.finfo(dtype).eps
    assert off <= first / 100 + 8 * rounding


@given(st.data(), st.sampled_from(BITS))
def test_bytes_of_any_kind_are_decoded_the_same_by_both_sides(
    data: st.DataObject, bits: int
) -> None:
    """Every sequence of bytes stands for something finite or for none: never for something else."""
    size = 4 * (num_words(4 * 8, bits) + num_words(4, SCALE_BITS) + num_words(8, 8))
    raw = data.draw(st.binary(min_size=size, max_size=size))
    coded = torch.tensor([list(raw)], dtype=torch.uint8).view(torch.float32)
    shape = (1, 4, 8)
    difference, is_none, _ = decode_message(coded, shape, bits)
    assert difference.isfinite().all()
    lower, upper = raw[-16:-12], int.from_bytes(raw[-12:-8], "little")
    codes = [byte + (upper >> 4 * place) % 8 * 256 for place, byte in enumerate(lower)]
    assert is_none.flatten().tolist() == [code == NOT_FINITE for code in codes]
    expected_next, arrived = update(torch.zeros(shape), coded, bits)
    assert expected_next.isfinite().all()
    assert torch.equal(arrived.isnan(), is_none.expand(shape))
    assert torch.equal(arrived.where(~is_none, 0), difference.where(~is_none, 0))
