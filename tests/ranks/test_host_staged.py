# SPDX-License-Identifier: Apache-2.0
"""Collectives of a device that gloo does not take: through the host, and only once asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cocodiff_compile.devices.host_staged import staged
from cocodiff_compile.lab.local_ranks import run_local_ranks

c10d = torch.ops._c10d_functional

REGISTERED = """
import torch
from cocodiff_compile.devices.host_staged import stage_through_host
has = torch._C._dispatch_has_kernel_for_dispatch_key
name = "_c10d_functional::all_to_all_single"
assert not has(name, "XPU")
stage_through_host("xpu")
stage_through_host("xpu")
assert has(name, "XPU") and not has(name, "CUDA")
"""


def _exchanges(rank: int, num_ranks: int) -> list[torch.Tensor]:
    source = torch.arange(6.0) + 1000 * rank
    splits = [6 // num_ranks] * num_ranks
    group = torch.distributed.group.WORLD
    assert group is not None
    name = group.group_name
    return [
        staged(c10d.all_to_all_single)(source, splits, splits, name),
        staged(c10d.all_gather_into_tensor)(source, num_ranks, name),
        staged(c10d.all_reduce)(source, "sum", name),
        staged(c10d.reduce_scatter_tensor)(source, "sum", num_ranks, name),
    ]


@pytest.mark.gloo
def test_results_are_there_when_the_call_returns() -> None:
    for rank, found in enumerate(run_local_ranks(_exchanges, 2, timeout_s=120)):
        own = slice(3 * rank, 3 * rank + 3)
        everyone = [torch.arange(6.0), torch.arange(6.0) + 1000]
        assert torch.equal(found[0], torch.cat([source[own] for source in everyone]))
        assert torch.equal(found[1], torch.cat(everyone))
        assert torch.equal(found[2], sum(everyone))  # type: ignore[arg-type]
        assert torch.equal(found[3], sum(everyone)[own])  # type: ignore[index]


def test_the_device_has_them_once_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
