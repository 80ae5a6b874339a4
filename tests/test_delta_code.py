"""Coded differences: what arrives, how many bytes travel, what both sides remember.

The arithmetic is checked against `steps_of` and `numbers_of`, which know the contract alone: bytes
end with one per group for the size of a step, elements stand for the middle of one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.graph.delta_code import (
    AHEAD,
    BITS,
    NONE,
    code_bytes,
    decode,
    distortion,
    encode,
    finite,
    lost_share,
    update,
)

GROUPS = (8, 24, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_STEP, LARGEST_STEP = 2.0**-20, 2.0**11 * 1.75

every_bits = pytest.mark.parametrize("bits", BITS)
every_group = pytest.mark.parametrize("group", GROUPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def send(memory: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """One exchange: what is remembered from now on, and what arrived."""
    return update(memory, encode(values.float() - memory.float(), bits), bits)


def send_often(values: Tensor, bits: int, times: int) -> Tensor:
    """What arrives of values that are sent again and again, first to one that has nothing."""
    memory = arrived = torch.zeros_like(values)
    for _ in range(times):
        memory, arrived = send(memory, values, bits)
    return arrived


def steps_of(coded: Tensor, num_groups: int) -> Tensor:
    """[P, n, 1], from the last byte of each group: 2**e * (1 + m/8), e from -20 on."""
    code = coded[:, -num_groups:].to(torch.float64).unsqueeze(-1)
    exponent = torch.floor(code / 8)
    return torch.exp2(exponent - 20) * (1 + (code - 8 * exponent) / 8)


def numbers_of(decoded: Tensor, coded: Tensor) -> Tensor:
    """How many steps each element stands for, as float64."""
    return decoded.double() / steps_of(coded, decoded.shape[1])


# Bytes


@every_bits
@every_group
def test_a_group_takes_its_bits_and_one_byte(bits: int, group: int) -> None:
    coded = encode(normal(3, 5, group), bits)
    assert coded.dtype == torch.uint8
    assert coded.shape == (3, 5 * group * bits // 8 + 5)
    assert coded.shape[1] == 5 * code_bytes(bits, group)


@every_bits
def test_what_goes_to_one_rank_depends_on_its_own_values_only(bits: int) -> None:
    """Each row of the bytes is decoded by another rank, which has nothing else."""
    difference = normal(3, 5, 24)
    coded, whole = encode(difference, bits), decode(encode(difference, bits), 24, bits)[0]
    for rank in range(3):
        row = slice(rank, rank + 1)
        assert torch.equal(encode(difference[row], bits), coded[row])
        assert torch.equal(decode(coded[row], 24, bits)[0], whole[row])


# What arrives


@every_bits
@every_group
def test_elements_arrive_as_the_middle_of_their_step(bits: int, group: int) -> None:
    """Numbers are -L/2 + 1/2 .. L/2 - 1/2, and where none is cut off they are off by half a step at
    most.
    """
    difference = normal(3, 50, group)
    coded = encode(difference, bits)
    decoded, is_none = decode(coded, group, bits)
    assert decoded.dtype == torch.float32
    assert not is_none.any()
    numbers = numbers_of(decoded, coded)
    half = 2 ** (bits - 1)
    assert torch.equal(numbers - 0.5, torch.round(numbers - 0.5)), "exactly a middle"
    assert numbers.abs().max() == half - 0.5
    off = (numbers_of(difference, coded) - numbers).abs()
    is_cut = numbers_of(difference, coded).abs() > half
    assert off[~is_cut].max() <= 0.5 + 1e-5
    assert torch.equal(difference.sign(), decoded.sign())
    assert (numbers[is_cut].abs() == half - 0.5).all()


@pytest.mark.parametrize(("bits", "most"), [(1, 0.15), (2, 0.06), (3, 0.03), (4, 0.01), (8, 0.0)])
@every_group
def test_few_normal_elements_are_cut_off_and_none_in_eight_bits(
    bits: int, most: float, group: int
) -> None:
    difference = normal(3, 200, group)
    is_cut = numbers_of(difference, encode(difference, bits)).abs() > 2 ** (bits - 1)
    assert is_cut.float().mean() <= most


@every_bits
@pytest.mark.parametrize("group", GROUPS[:2])
def test_each_bit_that_travels_belongs_to_one_element(bits: int, group: int) -> None:
    """Each element has bits that are worth 1, 2, .. 2**(bits - 1) steps, and no other."""
    coded = encode(normal(1, 2, group), bits)
    decoded, _ = decode(coded, group, bits)
    worth: dict[tuple[int, int], list[int]] = {}
    for byte in range(coded.shape[1] - 2):
        for place in range(8):
            flipped = coded.clone()
            flipped[0, byte] ^= 1 << place
            moved = numbers_of(decode(flipped, group, bits)[0] - decoded, coded)[0]
            ((row, element),) = moved.nonzero().tolist()
            worth.setdefault((row, element), []).append(int(moved[row, element].abs()))
    assert len(worth) == 2 * group
    assert all(sorted(found) == [2**bit for bit in range(bits)] for found in worth.values())


@pytest.mark.parametrize(
    ("bits", "group"),
    [(bits, group) for bits in BITS for group in GROUPS if bits < 8 or group >= 32],
)
def test_what_is_lost_of_normal_elements_is_what_is_promised(bits: int, group: int) -> None:
    difference = normal(2, 4096, group)
    decoded, _ = decode(encode(difference, bits), group, bits)
    lost = float((decoded - difference).square().sum() / difference.square().sum())
    assert lost == pytest.approx(distortion(bits), rel=0.25)


@every_bits
@pytest.mark.parametrize("scale", [2.0**-10, 2.0**-3, 2.0**5])
def test_loss_is_the_same_share_at_every_scale(bits: int, scale: float) -> None:
    """Exactly so by powers of two, which steps follow."""
    difference = normal(2, 40, 32)
    decoded, _ = decode(encode(difference, bits), 32, bits)
    scaled, _ = decode(encode(difference * scale, bits), 32, bits)
    assert torch.equal(scaled, decoded * scale)


def test_more_bits_lose_less() -> None:
    assert [distortion(bits) for bits in sorted(BITS)] == sorted(map(distortion, BITS))[::-1]


@every_bits
@every_group
def test_each_group_has_a_step_of_its_own(bits: int, group: int) -> None:
    """A group next to one a million times its size loses as little as alone."""
    small = normal(1, 1, group)
    both = torch.cat([small * 2**10, small * 2**-10], 1)
    decoded, _ = decode(encode(both, bits), group, bits)
    assert torch.equal(decoded[:, 0] * 2**-20, decoded[:, 1])


# The ends of the scale


@every_bits
@every_dtype
def test_no_difference_is_off_by_half_the_smallest_step(bits: int, dtype: torch.dtype) -> None:
    """Also after any number of sends: what one leaves, the next one takes back."""
    values = torch.zeros(1, 3, 16, dtype=dtype)
    for times in (1, 2, 3, 20):
        assert send_often(values, bits, times).abs().max() <= SMALLEST_STEP / 2


@every_bits
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-8])
def test_tiny_differences_are_off_by_half_the_smallest_step(bits: int, size: float) -> None:
    difference = normal(1, 20, 16) * size
    decoded, is_none = decode(encode(difference, bits), 16, bits)
    assert not is_none.any()
    assert (decoded - difference).abs().max() <= SMALLEST_STEP / 2 + 1e-12


@every_bits
@pytest.mark.parametrize("size", [1e6, 1e10, 1e18])
def test_huge_differences_arrive_cut_off_with_their_sign(bits: int, size: float) -> None:
    signs = torch.where(normal(1, 20, 16) < 0, -1.0, 1.0)
    decoded, is_none = decode(encode(signs * size, bits), 16, bits)
    assert not is_none.any()
    assert torch.equal(decoded, signs * (LARGEST_STEP * (2 ** (bits - 1) - 0.5)))


@every_bits
@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_finite_difference_is_never_taken_for_one_that_is_not(bits: int, size: float) -> None:
    """Its square may be infinite: it is finite itself."""
    _, is_none = decode(encode(torch.full((1, 1, 16), size), bits), 16, bits)
    assert not is_none.any()


@every_bits
def test_a_half_precision_value_near_the_largest_is_never_remembered_as_infinite(bits: int) -> None:
    """Half a step too much would be: then every later difference is infinite, and all is NaN."""
    before = torch.full((1, 1, 16), 64000.0, dtype=torch.float16)
    values = before.clone()
    values[..., 8:] = 0
    values[..., :8] = 65400
    memory = before
    for _ in range(3):
        memory, arrived = send(memory, values, bits)
        assert memory.isfinite().all()
        assert arrived.isfinite().all()


# Memories


@every_bits
@every_dtype
def test_what_arrives_is_the_memory_and_the_difference_rounded_once(
    bits: int, dtype: torch.dtype
) -> None:
    """What is remembered goes on by AHEAD of the difference."""
    memory = normal(2, 30, 24, seed=1).to(dtype)
    coded = encode(normal(2, 30, 24, seed=2), bits)
    difference = decode(coded, 24, bits)[0].double()
    remembered, arrived = update(memory, coded, bits)
    assert torch.equal(arrived, (memory.double() + difference).float().to(dtype))
    expected = memory.double() + (1 + AHEAD) * difference
    assert torch.equal(remembered, expected.float().to(dtype))
    assert remembered.dtype == arrived.dtype == dtype


def test_a_steady_change_is_expected() -> None:
    """In the long run the difference is smaller than the change by what is remembered ahead."""
    change, memory = normal(1, 20, 64), torch.zeros(1, 20, 64)
    for step in range(20):
        values = step * change
        difference = values - memory
        memory, _ = send(memory, values, 8)
    torch.testing.assert_close(difference, change / (1 + AHEAD), atol=0.05, rtol=0)


@every_bits
@every_dtype
@every_group
def test_sender_and_receiver_remember_the_same_to_the_bit(
    bits: int, dtype: torch.dtype, group: int
) -> None:
    """The receiver sees bytes only, one rank's row at a time; not a bit is apart after many."""
    sent = torch.zeros(2, 10, group, dtype=dtype)
    held = [torch.zeros(1, 10, group, dtype=dtype) for _ in range(2)]
    for step in range(8):
        values = (normal(2, 10, group, seed=step) * 3**step).to(dtype)
        coded = encode(values.float() - sent.float(), bits)
        sent, _ = update(sent, coded, bits)
        held = [update(held[rank], coded[rank : rank + 1], bits)[0] for rank in range(2)]
        assert torch.equal(torch.cat(held), sent)


@every_bits
@pytest.mark.parametrize(("dtype", "closest"), [(torch.float32, 2**-21), (torch.float16, 2**-8)])
def test_the_same_value_again_and_again_arrives_in_the_end(
    bits: int, dtype: torch.dtype, closest: float
) -> None:
    """What one send leaves is part of the next: a group with outliers takes some sends more."""
    values = normal(2, 20, 32)
    values[:, ::4, 3] = 20.0
    values = values.to(dtype)
    off = (send_often(values, bits, 150).float() - values.float()).abs()
    first = (send_often(values, bits, 1).float() - values.float()).abs()
    assert first.max() > 4 * closest
    assert off.max() <= closest * (8 if bits == 1 else 4)


@every_bits
def test_errors_do_not_add_up_over_changing_values(bits: int) -> None:
    """A walk of 100 steps that change every element by 1: a difference is that change, what the
    last one left, and what was wrongly expected.
    """
    values, memory, lost = torch.zeros(1, 64, 64), torch.zeros(1, 64, 64), []
    for step in range(100):
        values = values + normal(1, 64, 64, seed=step)
        memory, arrived = send(memory, values, bits)
        lost.append(float((values - arrived).square().mean()))
    of_one = distortion(bits) / ((1 - AHEAD**2) * (1 - distortion(bits)))
    assert sum(lost[-20:]) / 20 <= 1.5 * of_one


# What is not finite


def _with_broken_groups(values: Tensor) -> Tensor:
    broken = values.clone()
    broken[0, 1, 3] = float("nan")
    broken[0, 2, 0] = float("inf")
    broken[1, 4, -1] = float("-inf")
    return broken


IS_BROKEN = torch.zeros(2, 6, dtype=torch.bool)
IS_BROKEN[0, 1] = IS_BROKEN[0, 2] = IS_BROKEN[1, 4] = True


@every_bits
@every_dtype
def test_a_group_that_is_not_finite_arrives_as_nan_and_is_not_remembered(
    bits: int, dtype: torch.dtype
) -> None:
    memory, values = normal(2, 6, 24, seed=1).to(dtype), normal(2, 6, 24, seed=2).to(dtype)
    remembered, arrived = send(memory, _with_broken_groups(values), bits)
    assert arrived[IS_BROKEN].isnan().all()
    assert torch.equal(remembered[IS_BROKEN], memory[IS_BROKEN])


@every_bits
@every_dtype
def test_other_groups_are_not_harmed_by_one_that_is_not_finite(
    bits: int, dtype: torch.dtype
) -> None:
    memory, values = normal(2, 6, 24, seed=1).to(dtype), normal(2, 6, 24, seed=2).to(dtype)
    unbroken = send(memory, values, bits)
    for ours, theirs in zip(send(memory, _with_broken_groups(values), bits), unbroken, strict=True):
        assert torch.equal(ours[~IS_BROKEN], theirs[~IS_BROKEN])


@every_bits
def test_only_groups_that_are_not_finite_have_the_code_of_none(bits: int) -> None:
    coded = encode(_with_broken_groups(normal(2, 6, 24)), bits)
    assert torch.equal(coded[:, -6:] == NONE, IS_BROKEN)
    _, is_none = decode(coded, 24, bits)
    assert torch.equal(is_none.squeeze(-1), IS_BROKEN)


@every_bits
def test_after_a_group_that_was_not_finite_all_goes_on_as_if_it_had_not_been(bits: int) -> None:
    memory, values = normal(2, 6, 24, seed=1), normal(2, 6, 24, seed=2)
    broken = torch.where(IS_BROKEN.unsqueeze(-1), float("nan"), memory)
    later, _ = send(send(memory, broken, bits)[0], values, bits)
    direct, _ = send(memory, values, bits)
    assert later.isfinite().all()
    assert torch.equal(later[IS_BROKEN], direct[IS_BROKEN])


@every_dtype
def test_of_values_in_full_what_is_finite_is_remembered(dtype: torch.dtype) -> None:
    values = normal(2, 6, 24).to(dtype)
    assert torch.equal(finite(values), values)
    broken = _with_broken_groups(values)
    assert torch.equal(finite(broken), torch.where(broken.isfinite(), broken, 0.0))
    assert finite(broken).dtype == dtype


# The loss


def test_the_lost_share_is_energy_left_out_over_energy_sent() -> None:
    values, arrived = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])
    assert float(lost_share(values, arrived)) == pytest.approx(1 / 25)
    assert float(lost_share(values, values)) == 0
    assert float(lost_share(torch.zeros(2), torch.zeros(2))) == 0


@every_bits
def test_the_lost_share_of_a_first_send_is_the_distortion(bits: int) -> None:
    values = normal(2, 2000, 32).bfloat16()
    measured = float(lost_share(values, send_often(values, bits, 1)))
    assert measured == pytest.approx(distortion(bits), rel=0.25)


# Any values


numbers = st.floats(width=32, min_value=-(2.0**17), max_value=2.0**17)
groups = st.sampled_from(GROUPS[:3]).flatmap(
    lambda group: st.lists(numbers, min_size=group, max_size=group)
)


@given(groups, st.sampled_from(BITS))
def test_any_group_is_off_by_half_a_step_or_cut_off(elements: list[float], bits: int) -> None:
    difference = torch.tensor([[elements]])
    coded = encode(difference, bits)
    decoded, is_none = decode(coded, len(elements), bits)
    assert not is_none.any()
    wanted, got = numbers_of(difference, coded), numbers_of(decoded, coded)
    half = 2 ** (bits - 1)
    assert ((got - wanted).abs() <= torch.clamp(wanted.abs() - half + 0.5, min=0.5) + 1e-3).all()
    assert got.abs().max() <= half - 0.5


@settings(max_examples=25)
@given(groups, groups, st.sampled_from(BITS), st.sampled_from(DTYPES[:2]))
def test_from_any_memory_what_is_sent_again_and_again_comes_closer(
    old: list[float], new: list[float], bits: int, dtype: torch.dtype
) -> None:
    """However far away both are, and whatever is cut off on the way."""
    size = min(len(old), len(new))
    memory = torch.tensor([[old[:size]]], dtype=dtype) / 2**10
    values = torch.tensor([[new[:size]]], dtype=dtype) / 2**10
    first = float((values.float() - memory.float()).abs().max())
    for _ in range(150):
        memory, arrived = send(memory, values, bits)
        assert arrived.isfinite().all()
    off = float((values.float() - arrived.float()).abs().max())
    rounding = float(values.abs().max()) * torch.finfo(dtype).eps
    assert off <= first / 100 + 8 * rounding + SMALLEST_STEP


@given(st.data(), st.sampled_from(BITS))
def test_bytes_of_any_kind_are_decoded_the_same_by_both_sides(
    data: st.DataObject, bits: int
) -> None:
    """Every sequence of bytes stands for something finite or for none: never for something else."""
    raw = data.draw(st.binary(min_size=code_bytes(bits, 8), max_size=code_bytes(bits, 8)))
    coded = torch.tensor([list(raw)], dtype=torch.uint8)
    difference, is_none = decode(coded, 8, bits)
    assert difference.isfinite().all()
    assert bool(is_none) == (raw[-1] == NONE)
    remembered, arrived = update(torch.zeros(1, 1, 8), coded, bits)
    assert remembered.isfinite().all()
    assert arrived.isnan().all() if bool(is_none) else torch.equal(arrived, difference)
