"""Groups of elements to be coded, and one exchange of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.graph.delta_code import BITS, send, update

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
