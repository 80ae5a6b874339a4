# SPDX-License-Identifier: Apache-2.0
"""Finds the link rate at which communication takes a wanted time, or share of a step.

time = a + b / rate      a: processor time of the exchanges, b: bits on the wire
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cocodiff_compile.lab.bench.links import set_rate

MAX_MBIT = 10_000.0
"""The rate above which emulated links are as good as unlimited."""

_REPEATS = 4
MAX_TRIALS, _TOLERANCE = 5, 0.04
_GUESS = 1.5
"""The assumed ratio of an exchange's time to the wire time of its bytes, before any trial."""

Trial = tuple[float, float]
"""A rate in Mbit/s, and the seconds that communication added to a step."""


def next_rate(trials: Sequence[Trial], wanted_s: float) -> float:
    """Returns the rate fitted to the two trials nearest to `wanted_s`; with one, or two that
    contradict each other, a = 0. Returns MAX_MBIT if the processor time is already too long.
    """
    nearest = sorted(trials, key=lambda trial: abs(trial[1] - wanted_s))
    fixed_s, wire_megabits = _fit(nearest[0], nearest[min(1, len(trials) - 1)])
    if wanted_s <= fixed_s:
        return MAX_MBIT
    return min(MAX_MBIT, wire_megabits / (wanted_s - fixed_s))


def _fit(nearest: Trial, other: Trial) -> tuple[float, float]:
    slower, faster = sorted((nearest, other))
    if slower[0] < faster[0] and slower[1] > faster[1]:
        wire_megabits = (slower[1] - faster[1]) / (1 / slower[0] - 1 / faster[0])
        fixed_s = faster[1] - wire_megabits / faster[0]
        if fixed_s >= 0:
            return fixed_s, wire_megabits
    return 0.0, nearest[0] * nearest[1]


def set_share(
    share: int,
    timed: Callable[[bool], float],
    wire_megabits: float,
    trials: list[Trial],
    max_trials: int = MAX_TRIALS,
) -> float:
    """Returns the rate, of some that are tried, that comes nearest to `share` per cent of a step;
    it stays set. All ranks must call this.

    `timed(compute_only)` returns the seconds of a step, or of its computation only. New trials are
    appended to `trials`.
    """
    wanted = share / 100
    tried: dict[float, float] = {}
    for _ in range(max_trials):
        compute_s = _least(timed, compute_only=True)
        wanted_s = compute_s * wanted / (1 - wanted)
        guess = min(MAX_MBIT, _GUESS * wire_megabits / wanted_s)
        rate_mbit = next_rate(trials, wanted_s) if trials else guess
        set_rate(rate_mbit)
        step_s = _least(timed, compute_only=False)
        trials.append((rate_mbit, max(step_s - compute_s, 1e-3)))
        tried[rate_mbit] = abs(1 - compute_s / step_s - wanted)
        if tried[rate_mbit] < _TOLERANCE:
            break
    nearest = min(tried, key=tried.__getitem__)
    set_rate(nearest)
    return nearest


def _least(timed: Callable[[bool], float], compute_only: bool) -> float:
    """Returns the minimum of a few samples, since noise only adds."""
    return min(timed(compute_only) for _ in range(_REPEATS))
