# SPDX-License-Identifier: Apache-2.0
"""Sets how much a rewrite must gain before it is chosen, and what is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Gains are parts of the estimated time of a step."""

    unfused_gain: float = 0.01
    """Separate GEMMs for Q, K and V cost little more than one, so a small gain is enough."""
    head_chunk_gain: float = 0.03
    """Chunks make more code, which takes longer to compile."""
    token_chunk_gain: float = 0.03
    order_gain: float = 0.01
    """An order costs nothing but memory."""
    order_memory: float = 1.15
    """How many times the memory of the captured order another one may take."""
    head_chunks: tuple[int, ...] = (2, 3, 4)
    """The numbers of head chunks that "auto" tries."""
    token_chunks: int = 2
    """The number of token chunks that "auto" tries: more gain little, and make more kernels."""


def pays(before_s: float, after_s: float, gain: float) -> bool:
    """Returns whether a rewrite saves at least `gain` of the time before it."""
    return after_s <= (1 - gain) * before_s
