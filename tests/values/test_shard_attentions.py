# SPDX-License-Identifier: Apache-2.0
"""shard-tokens with attentions of one's own, and what is said of them when they are registered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cocodiff_compile import register_attention, unregister_attention
from cocodiff_compile.lab.coverage.examine import examine
from tests.support.plain_dits import HEADS, WIDTH

RANKS = 4


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    roles = (item.float().transpose(1, 2) for item in (query, key, value))
    return functional.scaled_dot_product_attention(*roles).transpose(1, 2).contiguous()


@torch.library.custom_op("tests::attend_few_bits", mutates_args=())
def _attend_few_bits(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _attended(query, key, value)


@torch.library.custom_op("tests::attend_by_fours", mutates_args=())
def _attend_by_fours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every four queries in a row share a scale, as kernels that quantise have it."""
    scales = [rows.abs().amax((1, 3), keepdim=True).expand_as(rows) for rows in query.split(4, 1)]
    return _attended(query / torch.cat(scales, 1), key, value)


@_attend_few_bits.register_fake
@_attend_by_fours.register_fake
def _shape_of_attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    del key, value
    return query.new_empty(query.shape, dtype=torch.float32)


@contextmanager
def _registered(op: Any, **said: Any) -> Iterator[None]:
    register_attention(op, layout="BSHD", query="query", key="key", value="value", **said)
    try:
        yield
    finally:
        unregister_attention(op)


class _Attends(nn.Module):
    def __init__(self, op: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv, self.op, self.dtype = nn.Linear(WIDTH, 3 * WIDTH), op, dtype

    def forward(self, image: Tensor, text: Tensor | None = None) -> Tensor:
        x = image if text is None else torch.cat([text, image], 1)
        q, k, v = self.qkv(x).to(self.dtype).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.op(q, k, v).flatten(2)
        return x[:, -image.shape[1] :]


class _Tied(nn.Module):
    """Reads one tensor in several roles of an attention."""

    def __init__(self, roles: str) -> None:
        super().__init__()
        self.qkv, self.roles = nn.Linear(WIDTH, 3 * WIDTH), roles

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x = torch.cat([text, image], 1)
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        roles = (parts["qkv".index(name)] for name in self.roles)
        return x + functional.scaled_dot_product_attention(*roles).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("roles", ["qkk", "qqv", "qkq", "qqq"])
@pytest.mark.parametrize(("text", "image"), [(8, 24), (5, 21), (1, 3)])
def test_one_tensor_may_have_several_roles(roles: str, text: int, image: int) -> None:
    torch.manual_seed(0)
    inputs = {"image": torch.randn(2, image, WIDTH), "text": torch.randn(2, text, WIDTH)}
    found = examine("tied", _Tied(roles).eval(), inputs, RANKS)
    if roles == "qkk":
        assert found.modes == {"Ulysses": 1}
        assert found.error < 1e-5
    else:
        assert "reads its query as a whole too" in found.reason


def test_keys_that_no_exchange_carries_are_gathered() -> None:
    op = torch.ops.tests.attend_few_bits
    torch.manual_seed(0)
    model = _Attends(op, torch.float8_e4m3fn).eval()
    with _registered(op):
        found = examine("few bits", model, {"image": torch.randn(2, 22, WIDTH)}, RANKS)
    assert found.modes == {"cross": 1}
    assert found.error < 1e-5


@pytest.mark.parametrize(("text", "image"), [(0, 32), (0, 22), (16, 32), (7, 21)])
def test_queries_that_depend_on_each_other_stay_in_their_order(text: int, image: int) -> None:
    op = torch.ops.tests.attend_by_fours
    torch.manual_seed(0)
    inputs = {"image": torch.randn(2, image, WIDTH), "text": torch.randn(2, text, WIDTH)}
    given = inputs if text else {"image": inputs["image"]}
    with _registered(op, has_independent_queries=False):
        found = examine("by fours", _Attends(op).eval(), given, RANKS)
    if (text, image) == (0, 32):  # exchanges deliver it as it is, without padding
        assert found.modes == {"Ulysses": 1}
        assert found.error < 1e-5
    else:
        assert "looks at the places of its rows" in found.reason
