# SPDX-License-Identifier: Apache-2.0
"""Calls of compiled graphs while pictures are denoised: what the policy hears of their loss."""

from __future__ import annotations

import pytest

from cocodiff_compile.v_major.denoising import denoising
from cocodiff_compile.v_major.payload import UNCOMPRESSED, Payload
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Policy, StepFacts
from tests.support.counted_calls import (
    CODED,
    INTRA,
    OTHER,
    Compiled,
    Listening,
    every_first,
    kinds,
)

pytestmark = pytest.mark.usefixtures("said")


@every_first
def test_the_policy_is_asked_once_per_step_and_told_the_last_drift(first: Payload) -> None:
    """The drift is the mean over a step's calls, with the worst; an uncompressed step has none."""
    policy = Listening(first=first)
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        for step in range(3):
            compiled.drift = 0.5 + step
            compiled()
            compiled.drift = 1.5 + step
            compiled(OTHER)
            run.step()
    lost = (None, 0.0) if first.is_uncompressed else (1.0, 1.5)
    assert policy.heard == [
        StepFacts(1, 9, lost[0], first, lost[1]),
        StepFacts(2, 9, 2.0, CODED, 2.5),
    ]


def test_a_policy_that_measures_nothing_hears_of_no_drift() -> None:
    policy = Listening(measures_drift=False)
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 2)
    assert [item.drift for item in policy.heard] == [None]


def test_the_drift_is_that_of_the_last_step_only() -> None:
    """A branch that is not called any more has lost nothing in it."""
    policy = Listening()
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        compiled.drift = 0.5
        with run.branch("only once"):
            compiled()
        for drift in (0.5, 4.0, 4.0):
            compiled.drift = drift
            compiled()
            run.step()
    assert [item.drift for item in policy.heard] == [None, 4.0]


@every_first
def test_a_call_that_is_new_in_a_coded_step_adds_nothing_to_its_drift(first: Payload) -> None:
    policy = Listening(first=first)
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        kinds(compiled, run, 1)
        compiled.drift = 4.0
        compiled()
        compiled.drift = 100.0
        assert compiled(OTHER) == first
        run.step()
        compiled()
    assert [item.drift for item in policy.heard] == [None if first.is_uncompressed else 0.0, 4.0]
    assert policy.heard[-1].worst == 4.0


LOSSES = [(1e-20, None, 1), (100.0, None, None), (float("nan"), None, None), (1e-20, 1e9, None)]


@pytest.mark.parametrize(("drift", "worst", "bits"), LOSSES)
@pytest.mark.parametrize(("target", "first"), [(40.0, INTRA), (90.0, UNCOMPRESSED)])
def test_an_adaptive_call_takes_more_bits_the_more_is_lost_and_in_the_end_none(
    drift: float, worst: float | None, bits: int | None, target: float, first: Payload
) -> None:
    """A step is sent uncompressed if no number of bits suffices, not in the code that failed."""
    policy, most = Adaptive(target), Payload.uniform(8)
    compiled = Compiled(policy)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 1) == [first]
        compiled.drift, compiled.worst = drift, worst
        chosen = Payload.uniform(bits) if bits else UNCOMPRESSED
        assert kinds(compiled, run, 3)[:2] == [policy.usual, chosen]
        if chosen == UNCOMPRESSED:
            assert kinds(compiled, run, 3) == [UNCOMPRESSED, most, UNCOMPRESSED]


@pytest.mark.parametrize(("drift", "worst"), [(1.0, None), (float("nan"), None), (1e-20, 1e9)])
def test_after_a_first_step_that_lost_too_much_the_next_one_is_uncompressed(
    drift: float, worst: float | None
) -> None:
    compiled = Compiled(Adaptive(40.0), drift=drift, worst=worst)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 3) == [INTRA, UNCOMPRESSED, Payload.uniform(8)]


@pytest.mark.parametrize("policy", [Fixed(CODED), Fixed(CODED, first=INTRA), Adaptive(40.0)])
def test_a_graph_whose_exchanges_are_all_declined_runs_in_every_step(policy: Policy) -> None:
    """It remembers nothing, not even a drift."""
    compiled = Compiled(policy, num_caches=0)
    with denoising(num_steps=9) as run:
        assert kinds(compiled, run, 3)[0] == policy.first
    assert all(caches == [] for _, caches in compiled.calls)
