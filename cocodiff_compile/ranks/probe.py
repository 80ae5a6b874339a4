# SPDX-License-Identifier: Apache-2.0
"""Measures how long phases take on the live group, the second half of `auto`, within a time budget.

All sub-groups of a set of axes exchange at once, as they do in a real phase, and alternate with
those of the other axes, as in an exchange of two phases; the flat exchange is measured by itself.
Sizes are tried from small to large as long as the budget allows. Sizes at which phases come near
the flat exchange are measured again, interleaved, and each gets about the same time. A reading is
the mean over all ranks: a rank that comes late into an exchange, because it was delayed in the one
before, spends less time in it, and the mean over both is what they took together; a maximum would
count the wait twice. The time used so far is agreed on like the readings: every rank decides from
the same numbers when to stop, and has the same result.

An allocation, which can fail on one rank only, is agreed on before anyone exchanges. A rank that
fails later leaves the others waiting; they give up after `COLLECTIVE_TIMEOUT_S` and continue
without a measurement. gloo then closes the connections of that group, so that a later exchange
fails instead of hanging.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import fmean, median
from typing import TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from cocodiff_compile.ranks.detect import near_square_factor
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.measured_phase import IN_FLIGHT, MeasuredPhase, not_falling
from cocodiff_compile.topology.phases import all_phases

STEP = 5
SIZES_BYTES = tuple(20e3 * STEP**number for number in range(6))
"""The sizes per rank: 20 kB to 62.5 MB."""

COLLECTIVE_TIMEOUT_S = 20.0
FIRST_READINGS = 0.4
"""The share of the budget for the first reading of each size; the rest is for further readings."""
GRACE = 5
"""How many times its share the first reading of the two smallest sizes may take."""
MIN_READINGS, MAX_READINGS = 3, 20
"""A size with fewer readings is dropped if others have more: a single one says little."""
CLEARLY_SLOWER = 1.35
"""Phases that take this many times as long as the flat exchange need no second reading."""
CONCURRENT_SHARE = 0.5
"""The share of the budget, in addition to it, for concurrent exchanges."""
CONCURRENT_READINGS = 5
MIN_REPEATS = 3
BURST_S = 0.02
"""A reading repeats each exchange for this long, so that earlier traffic has less weight."""


@dataclass(frozen=True)
class Probed:
    """Holds a topology with its measurements, and the reason if they are missing."""

    topology: Topology
    reason: str | None = None


def probe(
    group_for_axes: Mapping[tuple[str, ...], dist.ProcessGroup],
    topology: Topology,
    device: torch.device,
    budget_s: float = 2.0,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> Probed:
    """Measures every set of axes that has a group, and the copies between phases.

    All ranks of the group over all axes, which must be among the groups, call this. It waits for
    the last of them, then takes `budget_s` at most, unless a rank fails. It never raises for what a
    transport or a device refuses: that is the `reason`, and nothing is measured.
    """
    try:
        bench = _Bench(group_for_axes, topology, device, timedelta(seconds=collective_timeout_s))
        return _probed(bench, topology, budget_s)
    except (RuntimeError, ValueError) as error:
        return Probed(topology, f"the probe failed, nothing was measured: {error}")


def _probed(bench: _Bench, topology: Topology, budget_s: float) -> Probed:
    readings = _first_readings(bench, FIRST_READINGS * budget_s)
    open_sizes = [
        size for size in readings if not _phases_are_slower(topology, bench.axes, readings[size][0])
    ]
    _more_readings(bench, {size: readings[size] for size in open_sizes}, budget_s)
    often = {
        size: all_
        for size, all_ in readings.items()
        if len(all_) >= MIN_READINGS or size not in open_sizes
    }
    if len(readings) < 2:
        reason = f"the probe's {budget_s:g} s were used up before two sizes were measured"
        return Probed(topology, reason)
    # Few readings say more than none.
    alone = _curves(bench.axes, often if len(often) >= 2 else readings)
    concurrent = _concurrent_readings(bench, alone, budget_s)
    return Probed(replace(topology, measured=(*alone, *concurrent)))


_Readings: TypeAlias = "dict[float, list[list[float]]]"
"""The readings of each size, each with the seconds of every phase."""


def _first_readings(bench: _Bench, budget_s: float) -> _Readings:
    """Reads each size once while the budget should allow; the first two may take longer."""
    readings: _Readings = {}
    bench.read(SIZES_BYTES[0], repeats=1)  # not counted: connections and memory are new
    last_s = before_last_s = 0.0
    for size in SIZES_BYTES:
        begun_s = bench.used_s
        expected_s = begun_s + last_s + STEP * max(0.0, last_s - before_last_s)
        if expected_s > (budget_s if len(readings) >= 2 else GRACE * budget_s):
            break
        readings[size] = [bench.read(size, MIN_REPEATS)]
        before_last_s, last_s = last_s or bench.used_s - begun_s, bench.used_s - begun_s
    return readings


def _more_readings(bench: _Bench, readings: _Readings, budget_s: float) -> None:
    """Adds readings within the budget, always of the fitting size that had the least time."""
    repeats = {
        size: max(MIN_REPEATS, round(BURST_S / max(first))) for size, (first,) in readings.items()
    }
    cost = {size: repeats[size] * sum(first) for size, (first,) in readings.items()}
    spent = dict.fromkeys(readings, 0.0)
    while any(len(readings[size]) < MAX_READINGS for size in readings):
        before_s = bench.used_s
        fitting = [size for size in spent if before_s + cost[size] <= budget_s]
        if not fitting:
            break
        size = min(fitting, key=lambda size: (spent[size], size))
        readings[size].append(bench.read(size, repeats[size]))
        cost[size] = bench.used_s - before_s
        spent[size] += cost[size]


def _phases_are_slower(
    topology: Topology, axes: Sequence[tuple[str, ...]], reading: Sequence[float]
) -> bool:
    """Returns whether no phases come near the flat exchange, for which one reading is enough."""
    times = dict(zip(axes, reading, strict=True))
    phased = (
        (len(phases) - 1) * times[()] + sum(times[phase] for phase in phases)
        for phases in all_phases(topology)[1:]
        if all(phase in times for phase in phases)
    )
    return min(phased, default=0.0) > CLEARLY_SLOWER * reading[-1]


def _curves(axes: Sequence[tuple[str, ...]], readings: _Readings) -> tuple[MeasuredPhase, ...]:
    """Returns the medians of the flat exchange, the last in `axes`, and of each phase relative to
    it.

    Load of others slows down a whole reading, so that phases are compared with the flat exchange of
    the same reading.
    """
    typical = []
    for all_ in readings.values():
        flat = median(reading[-1] for reading in all_)
        parts = zip(
            *([time / reading[-1] for time in reading[:-1]] for reading in all_), strict=True
        )
        typical.append([*(flat * median(part) for part in parts), flat])
    return tuple(
        MeasuredPhase(names, tuple(zip(readings, not_falling(seconds), strict=True)))
        for names, *seconds in zip(axes, *typical, strict=True)
    )


def _concurrent_readings(
    bench: _Bench, alone: Sequence[MeasuredPhase], budget_s: float
) -> list[MeasuredPhase]:
    """Measures several concurrent exchanges, at the sizes measured before, while the time allows.
    The minimum counts: it shows what the links can carry, and everything else only adds to it.
    """
    sizes = [size for size, _ in alone[-1].points]
    readings: dict[float, list[float]] = {}
    expected_s = [IN_FLIGHT * sum(phase.seconds(size) for phase in alone) for size in sizes]
    until_s = bench.used_s + CONCURRENT_SHARE * budget_s
    for size, seconds in zip(sizes, expected_s, strict=True):
        if bench.used_s + CONCURRENT_READINGS * seconds > until_s and len(readings) >= 2:
            break
        all_ = [bench.read_concurrent(size) for _ in range(CONCURRENT_READINGS)]
        readings[size] = [min(times) for times in zip(*all_, strict=True)]
    return [
        MeasuredPhase(axes, tuple(zip(readings, not_falling(seconds), strict=True)), IN_FLIGHT)
        for axes, *seconds in zip(bench.axes[1:], *readings.values(), strict=True)
    ]


class _Bench:
    """Holds the live groups, in the same order on all ranks, and the time used so far."""

    def __init__(
        self,
        groups: Mapping[tuple[str, ...], dist.ProcessGroup],
        topology: Topology,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.axes = [(), *sorted(groups, key=lambda axes: (len(axes), axes))]
        self._groups = [None, *(groups[axes] for axes in self.axes[1:])]
        self._sequences = _sequences(self.axes, topology.axis_names)
        self._whole = groups[topology.axis_names]
        self._num_ranks = topology.num_ranks
        self._device, self._timeout = device, timeout
        self._buffers: dict[float, Tensor] = {}
        self._agree([0.0], dist.AllreduceOptions().timeout)
        self._started = time.monotonic()
        self.used_s = 0.0

    def read(self, size_bytes: float, repeats: int) -> list[float]:
        """Returns the seconds of one exchange along each of `axes`, the same on every rank."""
        buffer = self._buffer(size_bytes)
        times: list[list[float]] = [[] for _ in self._groups]
        for sequence in self._sequences:
            for _ in range(repeats):
                for index in sequence:
                    times[index].append(self._time(self._groups[index], buffer))
        return self._agree_on_reading(map(fmean, times))

    def read_concurrent(self, size_bytes: float) -> list[float]:
        """Returns the seconds of one of several concurrent exchanges along each of `axes`."""
        buffer = self._buffer(size_bytes)
        times = []
        for group in self._groups[1:]:
            assert group is not None
            begin = time.monotonic()
            works = [self._start(group, buffer) for _ in range(IN_FLIGHT)]
            for work, _ in works:
                work.wait()
            torch.get_device_module(self._device).synchronize()
            times.append((time.monotonic() - begin) / IN_FLIGHT)
        return self._agree_on_reading(times)

    def _agree_on_reading(self, times: Iterable[float]) -> list[float]:
        used_s = time.monotonic() - self._started
        *agreed, self.used_s = self._agree([*times, used_s], self._timeout)
        return agreed

    def _buffer(self, size_bytes: float) -> Tensor:
        """Returns a buffer that divides among all ranks. Either all ranks get it, or all raise."""
        if size_bytes not in self._buffers:
            count = max(1, round(size_bytes / 4 / self._num_ranks))
            failed = 0.0
            try:
                self._buffers[size_bytes] = torch.ones(count * self._num_ranks, device=self._device)
            except RuntimeError:
                failed = 1.0
            if self._agree([failed], self._timeout) != [0.0]:
                raise RuntimeError(f"a rank cannot allocate {size_bytes / 1e6:g} MB to exchange")
        return self._buffers[size_bytes]

    def _time(self, group: dist.ProcessGroup | None, buffer: Tensor) -> float:
        begin = time.monotonic()
        if group is None:
            _copy_twice(buffer, self._num_ranks)
        else:
            self._start(group, buffer)[0].wait()
        torch.get_device_module(self._device).synchronize()
        return time.monotonic() - begin

    def _start(self, group: dist.ProcessGroup, buffer: Tensor) -> tuple[dist.Work, Tensor]:
        """Starts an exchange into new memory, as a compiled graph does."""
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        received = torch.empty_like(buffer)
        return group.alltoall_base(received, buffer, [], [], options), received

    def _agree(self, seconds: list[float], timeout: timedelta) -> list[float]:
        """Returns the mean over ranks, by a sum of whole nanoseconds, whose order is free."""
        values = torch.tensor([round(s * 1e9) for s in seconds], device=self._device)
        options = dist.AllreduceOptions()
        options.timeout = timeout  # what is reduced with is a sum unless set
        self._whole.allreduce([values], options).wait()
        return [total / self._num_ranks / 1e9 for total in values.tolist()]


def _sequences(parts: Sequence[tuple[str, ...]], names: Sequence[str]) -> list[list[int]]:
    """Returns the places in `parts` measured alternately: copies, axes, the others; all alone."""
    sequences = []
    for index, axes in enumerate(parts):
        rest = tuple(name for name in names if name not in axes)
        other = parts.index(rest) if rest in parts else 0
        if axes and not rest:
            sequences.append([index] if len(names) > 1 else [0, index])
        elif axes and not 0 < other < index:
            sequences.append([0, index, other] if other else [0, index])
    return sequences


def _copy_twice(buffer: Tensor, num_ranks: int) -> None:
    """Transposes rows and columns and back, as between two phases."""
    rows = near_square_factor(num_ranks)
    columns = num_ranks // rows
    transposed = buffer.view(rows, columns, -1).transpose(0, 1).contiguous()
    transposed.transpose(0, 1).contiguous()
