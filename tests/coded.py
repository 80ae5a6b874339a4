"""Groups of elements to be coded, and one exchange of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.graph.delta_code import (
    BITS,
    NONE,
    difference_of,
    pack,
    quantize,
    send,
    unpack,
    update,
)

GROUPS = (8, 24, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_STEP = 2.0**-20

every_bits = pytest.mark.parametrize("bits", BITS)
every_group = pytest.mark.parametrize("group", GROUPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

numbers = st.floats(width=32, min_value=-(2.0**17), max_value=2.0**17)
any_group = st.sampled_from(GROUPS[:3]).flatmap(
    lambda group: st.lists(numbers, min_size=group, max_size=group)
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def memory_and_values(num_groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[2, n, 24], far from each other."""
    memory, values = (normal(2, num_groups, 24, seed=seed).to(dtype) for seed in (1, 2))
    return memory, values


def steps_of_codes(code: Tensor) -> Tensor:
    """2**e * (1 + m/8), e from -20 on: as float64."""
    code = code.double()
    return torch.exp2(torch.floor(code / 8) - 20) * (1 + (code % 8) / 8)


def encode(difference: Tensor, bits: int) -> Tensor:
    """Bytes of a difference without spreads: [P, n, G] -> [P, n*G*bits/8 + n]."""
    return pack(*quantize(difference, bits), bits)


def decode(coded: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """What `encode` coded: the difference, [P, n, G], and which groups are none, [P, n, 1]."""
    number, code = unpack(coded, group, bits)
    return difference_of(number, code, bits), code == NONE


def decode_message(message: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """The same of all that one rank sends to another, whose last bytes are spreads."""
    scaled, is_none = decode(message[:, :-group], group, bits)
    spread = steps_of_codes(message[:, None, -group:])
    return (scaled.double() * spread).float(), is_none


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
    memory: Tensor, values: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: of the receiver, who sees bytes only. The
    sender knows both, to the bit.
    """
    coded, remembered, arriving = send(values, memory, bits, is_anew)
    held, arrived = update(memory, coded, bits, is_anew)
    assert torch.equal(held, remembered)
    assert torch.equal(arrived.nan_to_num(), arriving.nan_to_num())
    assert torch.equal(arrived.isnan(), arriving.isnan())
    return held, arrived


def send_often(values: Tensor, bits: int, times: int) -> Tensor:
    """What arrives of values that are sent again and again, first to one that has nothing."""
    memory = arrived = torch.zeros_like(values)
    for _ in range(times):
        memory, arrived = exchange(memory, values, bits)
    return arrived
