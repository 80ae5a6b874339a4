# SPDX-License-Identifier: Apache-2.0
"""Every pass on many random models: `python -m tests.fuzz --count 1000`, or `make fuzz`.

Prints each model on which a pass crashed or changed a value, with its seed, and at the end how many
were rewritten. `--first 17 --count 1` tries one seed again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from tests.support.random_trials import RUNS, Trial, try_seed

MIN_SHARE = 0.5
"""The share of attempts that must be rewritten: a pass that declines everything proves nothing."""


def _start() -> None:
    torch.set_num_threads(1)


def _try(seed: int) -> Trial:
    try:
        return try_seed(seed)
    except Exception as error:
        return Trial.crashed(seed, error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    seeds = range(options.first, options.first + options.count)
    print(f"seeds {seeds[0]} to {seeds[-1]}, {options.workers} processes", flush=True)
    begin = time.monotonic()
    trials = []
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.workers, _start, maxtasksperchild=100) as pool:
        for trial in pool.imap_unordered(_try, seeds):
            trials.append(trial)
            _tell(trial)
            if len(trials) % 50 == 0:
                minutes = (time.monotonic() - begin) / 60
                print(f"{len(trials)} of {len(seeds)} models, {minutes:.1f} min", flush=True)
    return _summary(trials)


def _tell(trial: Trial) -> None:
    for name, what in trial.failures.items():
        print(f"seed {trial.seed}: {name}: {what}\n    {trial.description}", flush=True)


def _summary(trials: Sequence[Trial]) -> int:
    counts = {name: Counter(_kind(trial, name) for trial in trials) for name in RUNS}
    print(f"\n{'pass':20}{'rewritten':>11}{'declined':>11}{'nothing':>11}{'wrong':>11}")
    for name, found in counts.items():
        row = (found[kind] for kind in ("rewritten", "declined", "left", "wrong"))
        print(f"{name:20}" + "".join(f"{number:11}" for number in row))
    total = sum(counts.values(), Counter())
    tried = total["rewritten"] + total["declined"] + total["wrong"]
    share = total["rewritten"] / max(1, tried)
    wrong = [trial.seed for trial in trials if trial.failures]
    crashes = sum("Error" in what for trial in trials for what in trial.failures.values())
    sites = sum(trial.sites for trial in trials)
    made = sum(trial.attentions for trial in trials)
    print(f"\n{len(trials)} models, {sites} of {made} Ulysses attentions found")
    print(f"rewritten: {share:.0%} of {tried} attempts")
    print(f"{total['wrong'] - crashes} differences, {crashes} crashes", *wrong)
    return 1 if wrong or share <= MIN_SHARE else 0


def _kind(trial: Trial, name: str) -> str:
    if name in trial.failures or "capture" in trial.failures:
        return "wrong"
    return trial.outcomes[name]


if __name__ == "__main__":
    sys.exit(main())
