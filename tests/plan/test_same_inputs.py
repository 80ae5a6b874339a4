# SPDX-License-Identifier: Apache-2.0
"""Digests that ranks compare tell values apart, whatever differs between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cocodiff_compile.ranks.agreement.same_inputs import digest

LATENTS = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))


def _other_channels(values: Tensor, step: int) -> Tensor:
    other = values.clone()
    other[..., step - 1 :: step] *= -1
    return other


CHANGES: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "a sign": (LATENTS, lambda x: torch.where(torch.arange(64) == 7, -x, x)),
    "all signs, of 64 bits": (LATENTS.double(), torch.neg),
    "every second sign": (LATENTS, lambda x: _other_channels(x, 2)),
    "every fourth sign, of 16 bits": (LATENTS.bfloat16(), lambda x: _other_channels(x, 4)),
    "a conjugate": (torch.view_as_complex(LATENTS.unflatten(-1, (-1, 2))), torch.conj),
    "all bits": (LATENTS.view(torch.int32), torch.bitwise_not),
    "an order": (LATENTS, lambda x: x.flip(0)),
    "a shape": (LATENTS, lambda x: x.flatten(1)),
    "a dtype": (LATENTS, lambda x: x.view(torch.int32)),
    "zeros behind": (torch.zeros(8), lambda x: x[:7]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_values_have_another_digest(name: str) -> None:
    values, change = CHANGES[name]
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(change(values))


def test_every_length_of_a_mask_has_its_own_digest() -> None:
    places = torch.arange(4096)
    found = {str(digest(places < length)) for length in range(4097)}
    assert len(found) == 4097


def test_memory_of_a_value_does_not_count() -> None:
    other = LATENTS.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert other.stride() != LATENTS.stride()
    assert digest(other) == digest(LATENTS)
