# SPDX-License-Identifier: Apache-2.0
"""Coded differences in the code that Inductor generates: the same to the bit as op by op, words
included, whose bits as float32 may be those of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cocodiff_compile.v_major.delta_code import lost_shares, send, update
from tests.support.coded import normal

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
def test_generated_code_sends_and_caches_the_same(
    shape: tuple[int, int, int], bits: int, dtype: torch.dtype
) -> None:
    reference, values = (normal(*shape, seed=seed).to(dtype) for seed in (1, 2))
    values[0, 3, 5] = float("nan")
    values[:, -shape[1] // 4 :, 0] += 8  # numbers of ones only, in the upper bits of words
    for place, size in enumerate((1e30, 1e-38, 1e-42)):
        values[1, place] *= size
        reference[1, place] *= -size
    values[1, 3] = reference[1, 3]
    values[1, 4], reference[1, 4] = (sign * torch.finfo(dtype).max for sign in (1, -1))
    words, *sent = _compiled(send)(values, reference, bits)
    same_words, *same = send(values, reference, bits)
    assert torch.equal(words.view(torch.int32), same_words.view(torch.int32))
    assert bits == 3 or words.isnan().any(), "else nothing is asked of words that look like NaN"
    received = _compiled(update)(reference, words, bits)
    for ours in (sent, received):
        for item, theirs in zip(ours, same, strict=True):
            _assert_equal(item, theirs)


def test_generated_code_measures_the_same_loss() -> None:
    """At all scales at once, and NaN where something is not finite."""
    values, noise = normal(2, 32, 32, seed=1), normal(2, 32, 32, seed=2)
    values[0, 1], values[0, 2] = 1e30 * values[0, 1], 1e-30 * values[0, 2]
    arrived = values * (1 + 0.1 * noise)
    compiled = _compiled(lost_shares)
    torch.testing.assert_close(compiled(values, arrived), lost_shares(values, arrived))
    values[1, 5, 3] = float("nan")
    assert compiled(values, arrived).isnan().all()
