# SPDX-License-Identifier: Apache-2.0
"""Groups of elements to be coded, and one exchange of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.v_major.delta_code import (
    BITS,
    NOT_FINITE,
    PLAIN,
    SCALE_BITS,
    half_difference,
    normalize,
    num_words,
    pack,
    quantize,
    send,
    unpack,
    update,
)

GROUPS = (8, 24, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_SPREAD = 20 * 8
"""The code of a spread of 1."""

every_bits = pytest.mark.parametrize("bits", BITS)
every_group = pytest.mark.parametrize("group", GROUPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

numbers = st.floats(width=32, min_value=-(2.0**17), max_value=2.0**17)
any_group = st.sampled_from(GROUPS[:3]).flatmap(
    lambda group: st.lists(numbers, min_size=group, max_size=group)
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_and_values(num_groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[2, n, 24], far from each other."""
    reference, values = (normal(2, num_groups, 24, seed=seed).to(dtype) for seed in (1, 2))
    return reference, values


def spreads_of_codes(code: Tensor) -> Tensor:
    """2**e * (1 + m/8), e from -20 on: as float64."""
    code = code.double()
    return torch.exp2(torch.floor(code / 8) - 20) * (1 + (code % 8) / 8)


def steps_of_codes(code: Tensor, bits: int) -> Tensor:
    """A scale is 2**e * (1 + m/8), e from -127 on, and L/2 steps of half a difference; 0 is none.
    As float64.
    """
    code = code.double() % PLAIN
    scale = torch.exp2(torch.floor(code / 8) - 127) * (1 + (code % 8) / 8)
    return torch.where(code == 0, 0.0, 2 * scale / 2 ** (bits - 1))


def encode(difference: Tensor, bits: int) -> Tensor:
    """Words of a difference without spreads, as whole numbers: what words are as float32 says
    nothing, and nothing is equal to itself among it.
    """
    return encode_spread(difference, torch.full((len(difference), 1, 1), float(NO_SPREAD)), bits)


def encode_spread(difference: Tensor, spread: Tensor, bits: int) -> Tensor:
    """The same with spreads, which are not among the words."""
    number, code = quantize(normalize(difference * 0.5), spread, bits)
    return torch.cat([pack(number, bits), pack(code, SCALE_BITS)], 1).view(torch.int32)


def codes_of(coded: Tensor, num_groups: int) -> Tensor:
    """Returns the codes of scales, [P, n, 1], which `encode` packs last."""
    last = coded[:, -num_words(num_groups, SCALE_BITS) :].view(torch.float32)
    return unpack(last, num_groups, SCALE_BITS).unsqueeze(-1)


def decode(
    coded: Tensor, shape: Sequence[int], bits: int, spread: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the coded difference, of that shape, and which groups are not finite, [P, n, 1]."""
    _, num_groups, group = shape
    words, count = num_words(num_groups * group, bits), num_groups * group
    number = unpack(coded[:, :words].view(torch.float32), count, bits).view(-1, num_groups, group)
    code = codes_of(coded, num_groups)
    is_none = code % PLAIN == NOT_FINITE
    spread = torch.full((1, 1, group), float(NO_SPREAD)) if spread is None else spread
    most = torch.finfo(torch.float32).max
    half = half_difference(number, code.where(~is_none, 0), spread, bits)
    return (2 * half).clamp(-most, most), is_none


def decode_message(
    message: Tensor, shape: Sequence[int], bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all that one rank sends to another, whose last words are spreads; and those."""
    group = shape[-1]
    words = message.view(torch.int32)
    last = words[:, -num_words(group, 8) :].view(torch.float32)
    spread = unpack(last, group, 8).unsqueeze(1)
    difference, is_none = decode(words[:, : -num_words(group, 8)], shape, bits, spread)
    return difference, is_none, spread


def with_broken_groups(values: Tensor) -> Tensor:
    """[2, 6, G], not finite where IS_BROKEN says so."""
    broken = values.clone()
    broken[0, 1, 3] = float("nan")
    broken[0, 2, 0] = float("inf")
    broken[1, 4, -1] = float("-inf")
    return broken


IS_BROKEN = torch.zeros(2, 6, dtype=torch.bool)
IS_BROKEN[0, 1] = IS_BROKEN[0, 2] = IS_BROKEN[1, 4] = True


def exchange(
    reference: Tensor, values: Tensor, bits: int, is_intra_coded: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns what the receiver, who sees bytes only, remembers from now on, and what arrived.
    Checks that the sender knows both exactly.
    """
    coded, expected_next, arriving = send(values, reference, bits, is_intra_coded)
    held, arrived = update(reference, coded, bits, is_intra_coded)
    assert torch.equal(held, expected_next)
    assert torch.equal(arrived.nan_to_num(), arriving.nan_to_num())
    assert torch.equal(arrived.isnan(), arriving.isnan())
    return held, arrived


def send_often(values: Tensor, bits: int, times: int) -> Tensor:
    """Returns what arrives of values sent `times` times, first to one that remembers nothing."""
    reference = arrived = torch.zeros_like(values)
    for _ in range(times):
        reference, arrived = exchange(reference, values, bits)
    return arrived
