# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the time that coding takes per element, for the sender and the receiver, in the code
that Inductor generates, beside a plain copy. It runs in one thread on what one of 2 ranks
exchanges: 148 tokens of 8 samples, 2 heads of 32 elements for each rank.

make bench-coding
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cocodiff_compile.report.tables import format_table
from cocodiff_compile.v_major.delta_code import BITS, send, update

SHAPE = (2, 148 * 8 * 2, 32)
REPEATS = 400


def main() -> None:
    torch.set_num_threads(1)
    print(f"\n{platform.machine()}, torch {torch.__version__}, best quarter of {REPEATS} runs\n")
    rows = [_row(dtype, bits) for dtype in (torch.bfloat16, torch.float32) for bits in BITS]
    print(format_table(("values", "bits", "copy ns", "send ns", "receive ns"), rows))


def _row(dtype: torch.dtype, bits: int) -> tuple[object, ...]:
    """Interleaved, so that a busy machine slows all alike."""
    torch._dynamo.reset()
    reference, values = (torch.randn(SHAPE).to(dtype) for _ in range(2))
    words, _, _ = send(values, reference, bits)
    variants: list[Callable[[], Any]] = [
        partial(_compiled(_copy), values, reference.clone()),
        partial(_compiled(_send), values, reference.clone(), bits),
        partial(_compiled(_receive), words, reference.clone(), bits),
    ]
    taken: list[list[float]] = [[] for _ in variants]
    for _ in range(REPEATS):
        for variant, seconds in zip(variants, taken, strict=True):
            begin = time.perf_counter()
            variant()
            seconds.append(time.perf_counter() - begin)
    quarters = [sorted(seconds[2:])[REPEATS // 4] for seconds in taken]
    elements = values.numel()
    return str(dtype)[6:], bits, *(f"{1e9 * seconds / elements:.2f}" for seconds in quarters)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled


def _copy(values: Tensor, reference: Tensor) -> None:
    reference.copy_(values)


def _send(values: Tensor, reference: Tensor, bits: int) -> Tensor:
    words, expected, _ = send(values, reference, bits)
    reference.copy_(expected)
    return words


def _receive(words: Tensor, reference: Tensor, bits: int) -> Tensor:
    expected, arrived = update(reference, words, bits)
    reference.copy_(expected)
    return arrived


if __name__ == "__main__":
    main()
