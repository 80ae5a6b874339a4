"""Coded differences in the code that Inductor generates: the same to the bit as op by op, words
included, whose bits as float32 may be those of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cocodiff_compile.graph.delta_code import send, update
from tests.coded import normal

CASES = [
    # Runs that fill words, and runs that do not.
    pytest.param((2, 32, 32), 2, torch.bfloat16, id="2 bits"),
    pytest.param((3, 7, 24), 3, torch.float32, id="3 bits, padded"),
]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled


def _assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize(("shape", "bits", "dtype"), CASES)
def test_generated_code_sends_and_remembers_the_same(
    shape: tuple[int, int, int], bits: int, dtype: torch.dtype
) -> None:
    memory, values = (normal(*shape, seed=seed).to(dtype) for seed in (1, 2))
    values[0, 3, 5] = float("nan")
    values[:, -shape[1] // 4 :, 0] += 8  # numbers of ones only, in the upper bits of words
    words, *sent = _compiled(send)(values, memory, bits)
    same_words, *same = send(values, memory, bits)
    assert torch.equal(words.view(torch.int32), same_words.view(torch.int32))
    assert bits == 3 or words.isnan().any(), "else nothing is asked of words that look like NaN"
    received = _compiled(update)(memory, words, bits)
    for ours in (sent, received):
        for item, theirs in zip(ours, same, strict=True):
            _assert_equal(item, theirs)
