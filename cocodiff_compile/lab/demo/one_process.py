# SPDX-License-Identifier: Apache-2.0
"""Draws the demo's pictures in one process, eagerly: what all others are compared with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from cocodiff_compile.lab.progress import Say
from cocodiff_compile.lab.quality.settings import QualitySettings
from cocodiff_compile.lab.quality.small_dit import load_small_dit, sample_pictures


@dataclass(frozen=True)
class OneProcess:
    """Holds the pictures of all rounds, and the least seconds of a step."""

    pictures: Tensor
    step_s: float


def draw_in_one_process(settings: QualitySettings, say: Say) -> OneProcess:
    """Draws what the ranks will draw, with one thread, as each of them has."""
    torch.set_num_threads(1)
    model, seconds, pictures = load_small_dit(), [], []
    for seed in settings.seeds:
        begin = time.monotonic()
        pictures.append(sample_pictures(model, settings.sampling, seed))
        seconds.append(time.monotonic() - begin)
    step_s = min(seconds) / settings.steps
    say(f"one process, eager, one thread: {step_s * 1e3:.0f} ms per step")
    return OneProcess(torch.cat(pictures), step_s)
