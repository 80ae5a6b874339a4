# SPDX-License-Identifier: Apache-2.0
"""Coded differences: how many bytes are sent, and what they stand for.

The arithmetic is checked against `steps_of` and `numbers_of`, which know of words only how they are
unpacked: the last hold twelve bits per group for its scale, and elements stand for the middle of a
step.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.v_major.delta_code import BITS, NOT_FINITE, code_bits, distortion
from tests.support.coded import (
    GROUPS,
    IS_BROKEN,
    any_group,
    codes_of,
    decode,
    encode,
    every_bits,
    every_group,
    normal,
    steps_of_codes,
    with_broken_groups,
)


def numbers_of(decoded: Tensor, coded: Tensor, bits: int) -> Tensor:
    """Returns the number of steps that each element stands for, as float64."""
    return decoded.double() / steps_of_codes(codes_of(coded, decoded.shape[1]), bits)


# Bytes


@every_bits
@every_group
def test_a_group_takes_its_bits_and_twelve_more(bits: int, group: int) -> None:
    coded = encode(normal(3, 40, group), bits)
    assert 32 * coded.shape[1] == 40 * (group * bits + 12) == 40 * code_bits(bits, group)


@every_bits
@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 7])
def test_few_groups_take_the_next_whole_word(bits: int, num_groups: int) -> None:
    """Two of them with three bits, and two for scales; nothing of a group is lost by it."""
    difference = normal(3, num_groups, 8)
    coded = encode(difference, bits)
    least = num_groups * code_bits(bits, 8)
    assert least <= 32 * coded.shape[1] < least + (4 if bits == 3 else 3) * 32
    many = torch.cat([difference, normal(3, 20 - num_groups, 8)], 1)
    expected, _ = decode(encode(many, bits), many.shape, bits)
    assert torch.equal(decode(coded, difference.shape, bits)[0], expected[:, :num_groups])


@every_bits
def test_what_goes_to_one_rank_depends_on_its_own_values_only(bits: int) -> None:
    """Each row of the bytes is decoded by another rank, which has nothing else."""
    difference = normal(3, 5, 24)
    coded = encode(difference, bits)
    whole, _ = decode(coded, difference.shape, bits)
    for rank in range(3):
        row = slice(rank, rank + 1)
        assert torch.equal(encode(difference[row], bits), coded[row])
        assert torch.equal(decode(coded[row], difference.shape, bits)[0], whole[row])


# What arrives


@every_bits
@every_group
def test_elements_arrive_as_the_middle_of_their_step(bits: int, group: int) -> None:
    """Numbers are -L/2 + 1/2 .. L/2 - 1/2, and where none is cut off they are off by half a step at
    most.
    """
    difference = normal(3, 50, group)
    coded = encode(difference, bits)
    decoded, is_none = decode(coded, difference.shape, bits)
    assert decoded.dtype == torch.float32
    assert not is_none.any()
    numbers = numbers_of(decoded, coded, bits)
    half = 2 ** (bits - 1)
    assert torch.equal(numbers - 0.5, torch.round(numbers - 0.5)), "exactly a middle"
    assert numbers.abs().max() == half - 0.5
    off = (numbers_of(difference, coded, bits) - numbers).abs()
    is_cut = numbers_of(difference, coded, bits).abs() > half
    assert off[~is_cut].max() <= 0.5 + 1e-5
    assert torch.equal(difference.sign(), decoded.sign())
    assert (numbers[is_cut].abs() == half - 0.5).all()


@pytest.mark.parametrize(("bits", "most"), [(1, 0.15), (2, 0.06), (3, 0.03), (4, 0.01), (8, 0.0)])
@every_group
def test_few_normal_elements_are_cut_off_and_none_in_eight_bits(
    bits: int, most: float, group: int
) -> None:
    difference = normal(3, 200, group)
    is_cut = numbers_of(difference, encode(difference, bits), bits).abs() > 2 ** (bits - 1)
    assert is_cut.float().mean() <= most


@every_bits
@pytest.mark.parametrize("group", GROUPS[:2])
def test_each_bit_that_is_sent_belongs_to_one_element(bits: int, group: int) -> None:
    """Each element has bits that are worth 1, 2, .. 2**(bits - 1) steps, and no other."""
    shape = (1, 4, group)
    coded = encode(normal(*shape), bits)
    decoded, _ = decode(coded, shape, bits)
    worth: dict[tuple[int, int], list[int]] = {}
    for byte in range(4 * (coded.shape[1] - 2)):
        for place in range(8):
            flipped = coded.clone()
            flipped.view(torch.uint8)[0, byte] ^= 1 << place
            moved = numbers_of(decode(flipped, shape, bits)[0] - decoded, coded, bits)[0]
            ((row, element),) = moved.nonzero().tolist()
            worth.setdefault((row, element), []).append(int(moved[row, element].abs()))
    assert len(worth) == 4 * group
    assert all(sorted(found) == [2**bit for bit in range(bits)] for found in worth.values())


@pytest.mark.parametrize(
    ("bits", "group"),
    [(bits, group) for bits in BITS for group in GROUPS if bits < 8 or group >= 32],
)
def test_what_is_lost_of_normal_elements_is_what_is_promised(bits: int, group: int) -> None:
    difference = normal(2, 4096, group)
    decoded, _ = decode(encode(difference, bits), difference.shape, bits)
    lost = float((decoded - difference).square().sum() / difference.square().sum())
    assert lost == pytest.approx(distortion(bits), rel=0.25)


@every_bits
@pytest.mark.parametrize("scale", [2.0**-115, 2.0**-10, 2.0**-3, 2.0**5, 2.0**124])
def test_loss_is_the_same_share_at_every_scale(bits: int, scale: float) -> None:
    """Exactly so by powers of two, which steps follow."""
    difference = normal(2, 40, 32)
    decoded, _ = decode(encode(difference, bits), difference.shape, bits)
    scaled, _ = decode(encode(difference * scale, bits), difference.shape, bits)
    assert torch.equal(scaled, decoded * scale)


def test_more_bits_lose_less() -> None:
    assert [distortion(bits) for bits in sorted(BITS)] == sorted(map(distortion, BITS))[::-1]


@every_bits
@every_group
def test_each_group_has_a_step_of_its_own(bits: int, group: int) -> None:
    """A group next to one a million times its size loses as little as alone."""
    small = normal(1, 1, group)
    both = torch.cat([small * 2**10, small * 2**-10], 1)
    decoded, _ = decode(encode(both, bits), both.shape, bits)
    assert torch.equal(decoded[:, 0] * 2**-20, decoded[:, 1])


# The ends of the scale


@every_bits
@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_finite_difference_is_never_taken_for_one_that_is_not(bits: int, size: float) -> None:
    """Its square may be infinite: it is finite itself."""
    _, is_none = decode(encode(torch.full((1, 1, 16), size), bits), (1, 1, 16), bits)
    assert not is_none.any()


@every_bits
def test_only_groups_that_are_not_finite_have_the_code_of_none(bits: int) -> None:
    coded = encode(with_broken_groups(normal(2, 6, 24)), bits)
    assert torch.equal(codes_of(coded, 6).squeeze(-1) == NOT_FINITE, IS_BROKEN)
    _, is_none = decode(coded, (2, 6, 24), bits)
    assert torch.equal(is_none.squeeze(-1), IS_BROKEN)


# Any values


@given(any_group, st.sampled_from(BITS))
def test_any_group_is_off_by_half_a_step_or_cut_off(elements: list[float], bits: int) -> None:
    difference = torch.tensor([[elements]])
    coded = encode(difference, bits)
    decoded, is_none = decode(coded, difference.shape, bits)
    assert not is_none.any()
    step = steps_of_codes(codes_of(coded, 1), bits)
    if step == 0:
        assert difference.abs().max() < torch.finfo(torch.float32).tiny
        return
    wanted, got = numbers_of(difference, coded, bits), numbers_of(decoded, coded, bits)
    half = 2 ** (bits - 1)
    assert ((got - wanted).abs() <= torch.clamp(wanted.abs() - half + 0.5, min=0.5) + 1e-3).all()
    assert got.abs().max() <= half - 0.5
