# SPDX-License-Identifier: Apache-2.0
"""Tests that ranks measure the device they compute with, and agree on the same numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import distributed as dist

from cocodiff_compile.compiler.live_device import agreed_device, measure_share, measure_start
from cocodiff_compile.devices.device import Device
from cocodiff_compile.lab.local_ranks import run_local_ranks


def test_a_share_of_a_core_takes_longer() -> None:
    device = Device("whole", 100.0, 10.0, 1.0, 0.5, 1.0, launch_s=1.0)
    half = device.shared(0.5, start_s=3.0)
    assert half.matmul_seconds(100) == 2 * device.matmul_seconds(100)
    assert half.attention_seconds(100) == 2 * device.attention_seconds(100)
    assert half.memory_seconds(100) == 2 * device.memory_seconds(100)
    assert (half.launch_s, half.start_s) == (2.0, 6.0)


def _on_one_core(_rank: int, _num_ranks: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    cpu, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    return {
        "device": agreed_device(cpu, torch.float32, group),
        "share": measure_share(cpu, group),
        "start": measure_start(cpu, group),
    }


@pytest.mark.gloo
def test_ranks_that_share_a_core_each_get_a_part_of_it() -> None:
    found = run_local_ranks(_on_one_core, 2, timeout_s=120)
    assert all(0 < item["share"] < 0.9 for item in found)  # one alone would have 1 each
    assert all(item["start"] > 0 for item in found)
    first, second = (item["device"] for item in found)
    assert first == second
    assert first.start_s > 0


def test_an_accelerator_is_neither_shared_nor_sends_by_its_own_cores() -> None:
    accelerator, nobody = torch.device("cuda"), None
    assert measure_share(accelerator, nobody) == 1.0  # type: ignore[arg-type]
    assert measure_start(accelerator, nobody) == 0.0  # type: ignore[arg-type]
