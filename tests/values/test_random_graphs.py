# SPDX-License-Identifier: Apache-2.0
"""Random models: every pass keeps the bits of every rank, or declines. `make fuzz` tries more."""

from __future__ import annotations

import pytest

from tests.support.random_trials import try_seed

PER_TEST = 5


@pytest.mark.parametrize("first", range(0, 50, PER_TEST))
def test_passes_keep_every_bit_of_random_models_or_decline(first: int) -> None:
    trials = [try_seed(seed) for seed in range(first, first + PER_TEST)]
    wrong = {trial.seed: (trial.failures, trial.description) for trial in trials if trial.failures}
    assert not wrong
    outcomes = [outcome for trial in trials for outcome in trial.outcomes.values()]
    assert outcomes.count("rewritten") > outcomes.count("declined")
