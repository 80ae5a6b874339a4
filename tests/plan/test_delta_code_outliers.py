# SPDX-License-Identifier: Apache-2.0
"""Coded differences of tokens unlike their neighbours, and of numbers of any size: what each head
of a token loses depends on itself, and the measured loss says what it is.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.v_major.delta_code import BITS, distortion, lost_shares, send, update

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
OUTLIER = 5

every_bits = pytest.mark.parametrize("bits", BITS)
intra_or_not = pytest.mark.parametrize("is_intra_coded", [True, False])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arriving(
    values: Tensor, bits: int, is_intra_coded: bool, reference: Tensor | None = None
) -> Tensor:
    """Returns what arrives at a receiver that remembers `reference`, or nothing. Checks that both
    sides remember the same.
    """
    reference = torch.zeros_like(values) if reference is None else reference
    coded, sent, arrives = send(values, reference, bits, is_intra_coded)
    held, arrived = update(reference, coded, bits, is_intra_coded)
    assert torch.equal(sent, held)
    assert torch.equal(arrives.view(torch.uint8), arrived.view(torch.uint8))
    return arrived


def lost(values: Tensor, arrived: Tensor) -> Tensor:
    """The share of its energy that each group lost."""
    values = values.double()
    rest = values - arrived.double()
    return rest.square().sum(-1) / values.square().sum(-1)


def others(shares: Tensor) -> Tensor:
    return torch.cat([shares[:, :OUTLIER], shares[:, OUTLIER + 1 :]], 1)


# A token unlike its neighbours


@every_bits
@intra_or_not
@pytest.mark.parametrize("factor", [10.0, 100.0, 1e3, 1e6, 1e30, 1e-3, 1e-30])
def test_a_token_that_is_far_larger_or_smaller_takes_nothing_from_the_others(
    bits: int, is_intra_coded: bool, factor: float
) -> None:
    values = normal(1, 256, 64)
    alone = lost(values, arriving(values, bits, is_intra_coded))
    values[0, OUTLIER] *= factor
    beside = lost(values, arriving(values, bits, is_intra_coded))
    assert others(beside).mean() < 1.02 * others(alone).mean()
    assert others(beside).max() < 1.1 * others(alone).max()
    assert beside[0, OUTLIER] < 2 * alone[0, OUTLIER]


@every_bits
def test_few_tokens_lose_little_to_one_that_is_far_larger(bits: int) -> None:
    """The pattern of one token has an eighth of the weight in a message of eight tokens."""
    values = normal(32, 8, 64)
    alone = lost(values, arriving(values, bits, True))
    values[:, OUTLIER] *= 1000
    assert others(lost(values, arriving(values, bits, True))).mean() < 1.5 * others(alone).mean()


@every_bits
@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_a_token_with_a_pattern_of_its_own_is_not_spoiled_by_that_of_the_others(
    bits: int, factor: float
) -> None:
    """It is largest where others are nothing: what is divided by their spread would be huge."""
    values = normal(1, 4096, 64)
    values[..., ::2] *= 1e-4
    values[0, OUTLIER] = factor * normal(64, seed=1)
    shares = lost(values, arriving(values, bits, True))
    assert shares[0, OUTLIER] < 2 * distortion(bits) + 1e-4
    assert others(shares).mean() < 1.6 * distortion(bits)


# Numbers of any size


def scales_of(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Sizes that normally distributed elements may have in a type."""
    least, most = (-12, 13) if dtype is torch.float16 else (-120, 124)
    return st.integers(least, most).map(lambda exponent: 2.0**exponent)


def relative(dtype: torch.dtype) -> float:
    """Returns the share of energy that rounding to `dtype` may lose."""
    return float(torch.finfo(dtype).eps) ** 2 * (256 if dtype is torch.float16 else 1)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(BITS), st.sampled_from(DTYPES), st.booleans())
def test_each_group_loses_the_same_share_whatever_its_size_and_that_of_others(
    data: st.DataObject, bits: int, dtype: torch.dtype, is_intra_coded: bool
) -> None:
    sizes = data.draw(st.lists(scales_of(dtype), min_size=64, max_size=64))
    values = (normal(2, 64, 32) * torch.tensor(sizes).unsqueeze(-1)).to(dtype)
    shares = lost(values, arriving(values, bits, is_intra_coded))
    assert shares.mean() < 1.3 * distortion(bits) + relative(dtype)
    assert shares.max() < 5 * distortion(bits) + relative(dtype)


SIZES = [
    *((torch.float16, size) for size in (1e-3, 1.0, 1e4)),
    *(
        (dtype, 10.0**power)
        for dtype in DTYPES[:2]
        for power in (-38, -30, -7, -6, 0, 5, 6, 20, 37)
    ),
]


@pytest.mark.parametrize(("dtype", "size"), SIZES, ids=str)
def test_eight_intra_coded_bits_hold_at_every_scale(dtype: torch.dtype, size: float) -> None:
    values = (normal(2, 64, 64) * size).to(dtype)
    assert lost(values, arriving(values, 8, True)).max() < 2.5 * distortion(8) + relative(dtype)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
groups = st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=3, max_size=3)


@settings(max_examples=200)
@given(groups, groups, st.sampled_from(BITS), st.sampled_from(DTYPES[:2]), st.booleans())
def test_any_finite_numbers_arrive_finite_and_in_eight_bits_close(
    new: list[list[float]],
    old: list[list[float]],
    bits: int,
    dtype: torch.dtype,
    is_intra_coded: bool,
) -> None:
    """Off by a share of the largest difference of their own group; differences need not be finite
    themselves. What is below all normal numbers may vanish.
    """
    most = torch.finfo(dtype).max
    values, reference = (torch.tensor([item]).clamp(-most, most).to(dtype) for item in (new, old))
    arrived = arriving(values, bits, is_intra_coded, reference)
    assert arrived.isfinite().all()
    expected = 0.0 if is_intra_coded else reference.double()
    largest = (values.double() - expected).abs().amax(-1, keepdim=True)
    rounding = torch.finfo(dtype).eps * torch.maximum(values.double().abs(), largest)
    off = (arrived.double() - values.double()).abs()
    share = 0.1 if bits == 8 else 8.0
    assert (off <= share * largest + rounding + 2 * SMALLEST).all()


@every_bits
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-42, 1e-39])
def test_what_is_below_all_normal_numbers_arrives_closer_than_nothing_would(
    bits: int, size: float
) -> None:
    values = normal(1, 20, 16) * size
    arrived = arriving(values, bits, True)
    off = (arrived.double() - values.double()).square().sum()
    assert off <= 1.3 * values.double().square().sum()


@every_bits
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-38, 1e38, LARGEST])
def test_a_constant_arrives_and_then_stays(bits: int, value: float) -> None:
    """A constant arrives as precisely as its code allows, and exactly if both sides hold it."""
    values = torch.full((1, 6, 16), value)
    arrived = arriving(values, bits, True)
    assert (values - arrived).abs().max() <= 0.5 * abs(value)
    for _ in range(3):
        assert torch.equal(arriving(values, bits, False, values), values)


@every_bits
@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_the_largest_numbers_may_change_their_sign(bits: int, share: float) -> None:
    """Their difference is not finite."""
    values = torch.full((1, 2, 16), share * LARGEST)
    values[:, :, ::3] *= -1
    arrived = arriving(values, bits, False, -values)
    assert arrived.isfinite().all()
    assert (arrived - values).abs().max() <= 1.05 * LARGEST
    if bits == 8:
        torch.testing.assert_close(arrived, values, rtol=0.02, atol=0)


@every_bits
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_of_a_token_that_is_not_finite_arrives_as_nan_alone(bits: int, value: float) -> None:
    values = normal(1, 40, 16)
    without = values.clone()
    without[0, OUTLIER] = 0.0
    values[0, OUTLIER, 3] = value
    for is_intra_coded in (True, False):
        arrived = arriving(values, bits, is_intra_coded)
        assert arrived[0, OUTLIER].isnan().all()
        assert torch.equal(others(arrived), others(arriving(without, bits, is_intra_coded)))


# The measured loss


@pytest.mark.parametrize("factor", [1.0, 100.0, 1e3, 1e6, 1e15, 1e30, 1e-30])
def test_the_loss_of_tokens_is_seen_beside_one_that_is_far_larger(factor: float) -> None:
    """Not as a share of the energy of all of them."""
    values, noise = normal(1, 256, 32), 0.1 * normal(1, 256, 32, seed=1)
    arrived = values + noise
    values[0, OUTLIER] *= factor
    arrived[0, OUTLIER] = values[0, OUTLIER]
    mean, worst = lost_shares(values, arrived).tolist()
    shares = lost(values, arrived)
    assert mean == pytest.approx(float(shares.mean()), rel=0.05)
    assert worst == pytest.approx(float(shares.max()), rel=0.05)


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1.0, 1e20, 6e37])
def test_the_measured_loss_is_the_same_share_at_every_scale(size: float) -> None:
    values, noise = normal(1, 64, 32), 0.1 * normal(1, 64, 32, seed=1)
    plain = lost_shares(values, values + noise).tolist()
    scaled = lost_shares(values * size, values * size + noise * size).tolist()
    assert scaled == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("arrives", [0.0, 2.0, -1.0])
def test_one_token_that_is_lost_among_many_is_the_worst(arrives: float) -> None:
    values = normal(2, 5000, 32)
    arrived = values.clone()
    arrived[1, 77] *= arrives
    mean, worst = lost_shares(values, arrived).tolist()
    assert worst == pytest.approx((1 - arrives) ** 2, rel=1e-3)
    assert mean == pytest.approx(worst / 10000, rel=1e-3)


def test_a_token_that_is_nearly_nothing_is_measured_against_its_neighbours() -> None:
    """The loss of such a token counts relative to an eighth of the size of its neighbours."""
    values = normal(1, 64, 32)
    values /= values.square().mean(-1, keepdim=True).sqrt()
    values[0, OUTLIER] *= 1e-6
    arrived = values.clone()
    arrived[0, OUTLIER] += 0.1
    assert float(lost_shares(values, arrived)[1]) == pytest.approx((0.1 * 8) ** 2, rel=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_loss_is_unknown_where_anything_is_not_finite(value: float) -> None:
    values = normal(1, 64, 32)
    arrived = values.clone()
    values[0, OUTLIER, 3] = value
    arrived[0, OUTLIER] = float("nan")
    assert lost_shares(values, arrived).isnan().all()
    assert lost_shares(values, values).isnan().all()


def test_what_arrives_of_nothing_is_all_loss() -> None:
    values, arrived = torch.zeros(1, 4, 16), torch.zeros(1, 4, 16)
    arrived[0, 1] = 1.0
    assert (lost_shares(values, arrived) > 1e30).all()
