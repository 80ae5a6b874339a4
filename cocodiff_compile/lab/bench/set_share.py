"""Sets emulated links so that communication takes a wanted share of a step."""

from __future__ import annotations

from collections.abc import Callable

from cocodiff_compile.lab.bench.find_rate import MAX_MBIT, Trial, next_rate
from cocodiff_compile.lab.bench.links import set_rate

_REPEATS = 4
_TRIALS, _TOLERANCE = 5, 0.04
_GUESS = 1.5
"""The assumed ratio of an exchange's time to the wire time of its bytes, before any trial."""


def set_share(
    share: int, timed: Callable[[bool], float], wire_megabits: float, trials: list[Trial]
) -> float:
    """Returns the rate, of some that are tried, that comes nearest to `share` per cent; it stays
    set.

    `timed(compute_only)` returns the seconds of a step, or of its computation only. `trials` holds
    rates and how long communication took at them; new trials are appended. All ranks must call
    this.
    """
    wanted = share / 100
    tried: dict[float, float] = {}
    for _ in range(_TRIALS):
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
