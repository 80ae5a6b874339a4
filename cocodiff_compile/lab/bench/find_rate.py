"""Finds the link rate at which communication takes a wanted time, by pure functions of numbers.

time = a + b / rate      a: processor time of the exchanges, b: bits on the wire
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_MBIT = 10_000.0
"""The rate above which emulated links are as good as unlimited."""

Trial = tuple[float, float]
"""A rate in Mbit/s, and the seconds that communication added to a step."""


def next_rate(trials: Sequence[Trial], wanted_s: float) -> float:
    """Returns the rate fitted to the two trials nearest to `wanted_s`. With one trial, or two that
    contradict each other, the fit assumes a = 0. Returns MAX_MBIT if the processor time is already
    too long.
    """
    nearest = sorted(trials, key=lambda trial: abs(trial[1] - wanted_s))
    fixed_s, wire_megabits = _fit(nearest[0], nearest[1]) if len(trials) > 1 else _alone(nearest[0])
    if wanted_s <= fixed_s:
        return MAX_MBIT
    return min(MAX_MBIT, wire_megabits / (wanted_s - fixed_s))


def _alone(trial: Trial) -> tuple[float, float]:
    rate, seconds = trial
    return 0.0, rate * seconds


def _fit(first: Trial, second: Trial) -> tuple[float, float]:
    slower, faster = sorted((first, second))
    if slower[0] == faster[0] or slower[1] <= faster[1]:
        return _alone(first)
    wire_megabits = (slower[1] - faster[1]) / (1 / slower[0] - 1 / faster[0])
    fixed_s = faster[1] - wire_megabits / faster[0]
    return (fixed_s, wire_megabits) if fixed_s >= 0 else _alone(first)
