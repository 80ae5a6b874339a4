# SPDX-License-Identifier: Apache-2.0
"""shard-tokens where values, sizes and outputs are odd: what is padded never shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cocodiff_compile.decide.shared_nodes import why_not_shared
from cocodiff_compile.ir.aten import aten
from cocodiff_compile.lab.coverage.examine import examine
from tests.support.plain_dits import WIDTH, Attention, Block
from tests.support.traced import traced


class _NormedWithoutEps(nn.Module):
    """Divides tokens by their length: 0 / 0 for a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.square().sum(-1, keepdim=True).sqrt()
        return x + self.attention(x)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, mask)


class _FewHeads(nn.Module):
    """Has fewer heads than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class _OddOutputs(nn.Module):
    """Returns more than tensors, an input as it is, a view of it, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.block(x)
        return {"y": y, "same": y, "x": x, "part": x[:, 1:], "none": None, "number": 3, "text": ""}


class _ReadsTheRow(nn.Module):
    """Reads one token of the result, which lies on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y * y[:, 3:4] + y.mean(1, keepdim=True) + y.cumsum(1)


class _WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.block(x)


def _empty_row(tokens: int, kind: str) -> Tensor:
    """A mask of which one query sees no key; in numbers, it sees each of them not at all."""
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    mask[..., 2, :] = False
    if kind == "bool":
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], str]] = {
    "NaN in padded rows": (_NormedWithoutEps, lambda: {"x": torch.randn(2, 22, WIDTH)}, "Ulysses"),
    "a row that sees nothing": (
        _Masked,
        lambda: {"x": torch.randn(2, 21, WIDTH), "mask": _empty_row(21, "bool")},
        "Ulysses",
    ),
    "a row that sees minus infinity": (
        _Masked,
        lambda: {"x": torch.randn(2, 21, WIDTH), "mask": _empty_row(21, "numbers")},
        "Ulysses",
    ),
    "fewer tokens than ranks": (Block, lambda: {"x": torch.randn(2, 3, WIDTH)}, "Ulysses"),
    "fewer heads than ranks": (_FewHeads, lambda: {"x": torch.randn(2, 16, WIDTH)}, "cross"),
    "odd outputs": (_OddOutputs, lambda: {"x": torch.randn(2, 16, WIDTH)}, "Ulysses"),
    "single rows": (_ReadsTheRow, lambda: {"x": torch.randn(2, 18, WIDTH)}, "Ulysses"),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_computes(name: str) -> None:
    build, inputs, mode = CASES[name]
    torch.manual_seed(0)
    found = examine(name, build().eval(), inputs(), num_ranks=4)
    assert not found.reason
    assert found.modes == {mode: 1}
    assert found.error < 1e-5


class _Draws(nn.Module):
    """Draws noise, from a generator that each rank may seed otherwise."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.block, self.is_read = Block(), is_read

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return self.block(x + noise if self.is_read else x)


RANDOM = "draws random numbers, which differ between ranks"


def test_a_model_that_draws_random_numbers_is_declined() -> None:
    x = torch.randn(2, 16, WIDTH)
    assert examine("noise", _Draws(is_read=True).eval(), {"x": x}, 4).reason.endswith(RANDOM)
    assert not examine("nobody reads it", _Draws(is_read=False).eval(), {"x": x}, 4).reason


@pytest.mark.parametrize(("dropout", "reason"), [(0.5, RANDOM), (0.0, "")])
def test_an_attention_with_dropout_is_declined(dropout: float, reason: str) -> None:
    def attend(x: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(x, x * 2, x * 3, dropout)[0]

    graph = traced(attend, torch.randn(1, 8, 16, 4))
    assert why_not_shared(graph).endswith(reason)
    assert bool(why_not_shared(graph)) is bool(reason)


def test_a_model_that_writes_to_its_input_is_declined() -> None:
    found = examine("writes", _WritesItsInput().eval(), {"x": torch.randn(2, 16, WIDTH)}, 4)
    assert found.reason == "the model writes to its inputs"
