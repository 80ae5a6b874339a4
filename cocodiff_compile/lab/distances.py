# SPDX-License-Identifier: Apache-2.0
"""Measures how far results are from those that are expected; what cannot be compared is infinitely
far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def largest_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Returns the largest error of several results. There must be as many as are expected."""
    return largest(map(_error, *_paired(actual, expected)))


def largest_relative_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Returns the largest error of several results, each relative to the largest value of it."""
    return largest(map(_relative_error, *_paired(actual, expected)))


def largest(errors: Iterable[float]) -> float:
    """Returns the largest of one or more errors; infinity if one is no number, which `max` passes
    over.
    """
    return max(math.inf if math.isnan(error) else error for error in errors)


def _paired(
    actual: Iterable[Tensor], expected: Iterable[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    ours, theirs = list(actual), list(expected)
    assert len(ours) == len(theirs), f"{len(ours)} results, where {len(theirs)} are expected"
    return ours, theirs


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    return float((actual - expected).abs().max()) if expected.numel() else 0.0


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    return _error(actual, expected) / (scale or 1.0)
