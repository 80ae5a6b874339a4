# SPDX-License-Identifier: Apache-2.0
"""Measures what a rank computes with: a matmul, an attention and an activation, a few times each.
Of all times the lower quartile counts: what others do on the machine only adds to them. Where ranks
outnumber the cores each gets a share of that, and one that sends by its own processor computes less
meanwhile: both are measured too.

All ranks measure at the same time, as they will compute, and have the same numbers. A dry run
goes by a guess, unless its process has measured before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch.nn.functional import linear, scaled_dot_product_attention

from cocodiff_compile.compat import find_group, outside_the_compiler
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.installed import properties_of
from cocodiff_compile.ir.aten import value_of
from cocodiff_compile.ir.attention_ops import attention_flops
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.ranks.agreement.all_ranks import from_first_rank, gathered
from cocodiff_compile.ranks.agreement.watch import watched
from cocodiff_compile.ranks.agreement.world import PerWorld, ranks_are_real

_LONG_ENOUGH_S = 2e-3
_READINGS = 12
_MAX_DOUBLINGS = 12
_EXCHANGES = 4
_SHARE_S = 0.1
"""Some slices of time of the system's scheduler."""

_measured: PerWorld[dict[tuple[str, torch.dtype], Device]] = PerWorld(dict)


def find_device(recognition: Recognition, dry_run: bool) -> Device:
    """Returns the rates of the device of the attentions. All live ranks call this at once."""
    exchange = recognition.sites[0].q.exchange
    value = value_of(exchange.start)
    key = (value.device.type, value.dtype)
    known = _measured.get()
    if key not in known:
        if dry_run or not ranks_are_real():
            return _unmeasured(value.device)
        with outside_the_compiler(), torch.no_grad(), watched(exchange.ranks):
            known[key] = agreed_device(value.device, value.dtype, find_group(exchange.group))
    return known[key]


def _unmeasured(device: torch.device) -> Device:
    kind, properties = device_kind(device.type), properties_of(device)
    return kind.cost_of(properties.name) if properties else kind.guess


def agreed_device(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> Device:
    """Measures on all ranks of a group at the same time, and returns the same rates on each."""
    measured = from_first_rank(measure_device(device, dtype), group)
    own = measure_share(device, group), measure_start(device, group)
    shares, starts = zip(*gathered(own, group), strict=True)
    return measured.shared(statistics.fmean(shares), statistics.fmean(starts))


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """Measures the rates that are reached with all of a rank's threads."""
    matmul = _rate(device, lambda size: _matmul(device, dtype, size))
    attention = _rate(device, lambda size: _attention(device, dtype, size))
    memory = _rate(device, lambda size: _activation(device, dtype, size))
    small = torch.ones(16, device=device, dtype=dtype)
    return Device(
        name=f"{device.type}, measured",
        matmul_flops_per_s=matmul,
        memory_bytes_per_s=memory,
        matmul_efficiency=1.0,
        attention_efficiency=attention / matmul,
        memory_efficiency=1.0,
        launch_s=_seconds(device, lambda: small + small),
    )


def measure_start(device: torch.device, group: dist.ProcessGroup) -> float:
    """Measures how long an exchange of few bytes keeps a processor, which computes too, busy."""
    if device.type != "cpu":
        return 0.0
    buffer = torch.ones(dist.get_world_size(group))
    _exchange(group, buffer)  # the first one connects
    taken = []
    for _ in range(_READINGS):
        begin = time.process_time()
        for _ in range(_EXCHANGES):
            _exchange(group, buffer)
        taken.append((time.process_time() - begin) / _EXCHANGES)
    return statistics.quantiles(taken, n=4)[0]


def measure_share(device: torch.device, group: dist.ProcessGroup) -> float:
    """Measures the share of a core that a rank gets while all ranks compute."""
    if device.type != "cpu":
        return 1.0
    _, compute = _matmul(device, torch.float32, 1)
    dist.barrier(group)
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    while (taken_s := time.perf_counter() - begin_s) < _SHARE_S:
        compute()
    return min(1.0, (time.thread_time() - begin_cpu_s) / taken_s)


def _exchange(group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
    options = dist.AllToAllOptions()
    group.alltoall_base(torch.empty_like(buffer), buffer, [], [], options).wait()


_Work = tuple[float, Callable[[], object]]


def _matmul(device: torch.device, dtype: torch.dtype, size: int) -> _Work:
    """Multiplies as a projection does: some libraries take many times longer for weights that do
    not lie the way those of a linear layer do.
    """
    rows, columns = 64 * size, 512
    left = torch.ones(rows, columns, device=device, dtype=dtype)
    weight = torch.ones(columns, columns, device=device, dtype=dtype)
    return 2.0 * rows * columns * columns, lambda: linear(left, weight)


def _attention(device: torch.device, dtype: torch.dtype, size: int) -> _Work:
    heads, tokens, head_size = size, 512, 64
    query = torch.ones(1, heads, tokens, head_size, device=device, dtype=dtype)
    flops = attention_flops(*[query.shape] * 3)
    return flops, lambda: scaled_dot_product_attention(query, query, query)


def _activation(device: torch.device, dtype: torch.dtype, size: int) -> _Work:
    """Applies an activation, which computes a little for all that it reads and writes."""
    source = torch.ones(size << 16, device=device, dtype=dtype)
    result = torch.empty_like(source)
    moved = 2.0 * source.numel() * source.element_size()
    return moved, lambda: torch.ops.aten.silu.out(source, out=result)


def _rate(device: torch.device, make: Callable[[int], _Work]) -> float:
    """Returns the work per second of a piece that takes long enough to be timed."""
    for doubling in range(_MAX_DOUBLINGS):
        amount, call = make(1 << doubling)
        seconds = _seconds(device, call, readings=1)
        if seconds >= _LONG_ENOUGH_S:
            break
    return amount / _seconds(device, call)


def _seconds(device: torch.device, call: Callable[[], object], readings: int = _READINGS) -> float:
    call()
    taken = []
    for _ in range(readings):
        _synchronize(device)
        begin = time.perf_counter()
        call()
        _synchronize(device)
        taken.append(time.perf_counter() - begin)
    return max(statistics.quantiles(taken, n=4)[0] if readings > 1 else taken[0], 1e-9)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()
