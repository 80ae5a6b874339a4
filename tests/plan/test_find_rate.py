# SPDX-License-Identifier: Apache-2.0
"""Rates that make communication take a wanted time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodiff_compile.lab.bench.find_rate import MAX_MBIT, next_rate


def test_one_trial_is_scaled() -> None:
    assert next_rate([(100.0, 2.0)], wanted_s=1.0) == pytest.approx(200.0)


@given(
    st.floats(0.001, 0.5),
    st.floats(10, 500),
    st.floats(20, 200),
    st.floats(1.5, 4),
    st.floats(0.1, 5),
)
def test_two_trials_find_what_both_follow(
    fixed_s: float, megabits: float, rate: float, factor: float, above_s: float
) -> None:
    trials = [(r, fixed_s + megabits / r) for r in (rate, rate * factor)]
    wanted_s = fixed_s + above_s
    found = next_rate(trials, wanted_s)
    assert found == pytest.approx(min(MAX_MBIT, megabits / above_s), rel=1e-3)


def test_the_nearest_trials_count() -> None:
    far, near, nearer = (1.0, 1000.0), (100.0, 1.1), (200.0, 0.6)
    assert next_rate([far, near, nearer], 0.35) == pytest.approx(400.0)


def test_what_the_processor_alone_exceeds_is_left_unlimited() -> None:
    assert next_rate([(100.0, 1.1), (200.0, 0.6)], 0.05) == MAX_MBIT


@pytest.mark.parametrize("other", [(50.0, 0.5), (100.0, 1.5), (50.0, 9.0)])
def test_trials_that_contradict_each_other_leave_the_nearest(other: tuple[float, float]) -> None:
    assert next_rate([(100.0, 1.0), other], 1.0) == pytest.approx(100.0)
