# SPDX-License-Identifier: Apache-2.0
"""Interpolates the measured time of a phase linearly between a few sizes.

An affine curve (latency + bytes / speed) is reproduced exactly, and a bend caused by a cache, a
protocol switch or an allocator is kept. Below the smallest size messages cost their latency, so
that the curve is level; above the largest size the last segment is extrapolated, up to REACH.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import shown

Points: TypeAlias = "tuple[tuple[float, float], ...]"

IN_FLIGHT = 4
"""The number of exchanges that are started at once to measure how long one occupies its links. A
single exchange leaves them idle between its messages, the more so where the two directions follow
each other.
"""

REACH = 4
"""A curve is used up to this many times the largest measured size."""


@dataclass(frozen=True)
class MeasuredPhase:
    """Holds the seconds of a phase along `axes`; along none, of the copies between two phases."""

    axes: tuple[str, ...]
    points: Points
    """(bytes per rank, seconds): sizes rise, seconds do not fall; two points or more."""
    in_flight: int = 1
    """The number of concurrent exchanges; the seconds are those of one of them."""

    def __post_init__(self) -> None:
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(self.points))
        positive = all(0 < number < float("inf") for point in self.points for number in point)
        if len(self.points) < 2 or not rising or not positive:
            raise UserError(
                f"points measured along {'+'.join(self.axes) or 'no axis'} are "
                f"{shown(self.points)}; allowed: two pairs (bytes, seconds) or more, numbers above "
                "0, bytes rising, seconds not falling"
            )

    def covers(self, size_bytes: float) -> bool:
        return size_bytes <= REACH * self.points[-1][0]

    def seconds(self, size_bytes: float) -> float:
        """Returns the seconds at a size, from the curve."""
        if size_bytes <= self.points[0][0]:
            return self.points[0][1]
        pairs = list(itertools.pairwise(self.points))
        around = (pair for pair in pairs if size_bytes <= pair[1][0])
        (left, low), (right, high) = next(around, pairs[-1])
        return low + (size_bytes - left) / (right - left) * (high - low)


def not_falling(seconds: Sequence[float]) -> list[float]:
    """Returns the nearest series that never falls: sections that fall are replaced by their mean.

    A larger message cannot be faster; where it was measured so, the readings differ only by noise.
    """
    runs: list[list[float]] = []
    for value in seconds:
        runs.append([value])
        while len(runs) > 1 and fmean(runs[-2]) > fmean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    return [fmean(run) for run in runs for _ in run]
