# SPDX-License-Identifier: Apache-2.0
"""Detects the axes of a live group, the first half of `auto`, from the locations that its ranks
report.

Ranks of one host are neighbours inside of a node, ranks of one card (the tiles of an XPU) inside of
that. An axis without visible structure is split into two near-square factors that share its link:
24 ranks of one host can exchange as 4 x 6, with 3 + 5 messages per rank instead of 23. Whether that
is faster is for the probe to measure (`probe.py`); without measurements such axes are not split
into phases.

The readers of device properties were never run on an accelerator.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.devices.installed import properties_of
from cocodiff_compile.devices.kind import MachineKind
from cocodiff_compile.topology.axes import Axis, Topology

MAX_AXES = 3


@dataclass(frozen=True)
class RankLocation:
    """Holds where one rank runs. `card` is the same for all tiles of a card; empty if unknown."""

    host: str
    device_type: str = "cpu"
    device_name: str = ""
    card: str = ""


@dataclass(frozen=True)
class Detected:
    """Holds the topology of a live group, and why some of the machine could not be used."""

    topology: Topology
    reasons: tuple[str, ...] = ()


def detect(locations: Sequence[RankLocation]) -> Detected:
    """Returns the axes of a group whose ranks, in group order, run at these locations."""
    kind = device_kind(locations[0].device_type).machine
    per_host, reason = _equal_runs([location.host for location in locations], "hosts")
    if reason:
        axes = [Axis("rank", len(locations), kind.node)]
        return Detected(_topology(axes, kind), (f"{reason}; ranks form one axis",))
    per_card, reason = _ranks_per_card(locations, per_host)
    sizes = [
        ("tile", per_card, kind.tile),
        (kind.inside, per_host // per_card, kind.local),
        ("node", len(locations) // per_host, kind.node),
    ]
    axes = [Axis(name, size, link) for name, size, link in sizes if size > 1]
    return Detected(_topology(axes, kind), (reason,) if reason else ())


def _topology(axes: list[Axis], kind: MachineKind) -> Topology:
    return Topology("auto", tuple(split_axes(axes)), kind.copy_bytes_per_s)


def _equal_runs(keys: Sequence[str], what: str) -> tuple[int, str | None]:
    """Returns how many consecutive ranks share a key, if every key has equally many in one run;
    otherwise 1 and the reason.
    """
    runs = [(key, len(list(group))) for key, group in groupby(keys)]
    names = [key for key, _ in runs]
    if twice := next((key for key in names if names.count(key) > 1), None):
        ranks = [rank for rank, key in enumerate(keys) if key == twice]
        return 1, f"{what} are interleaved: {twice!r} has ranks {_short(ranks)}"
    if len({count for _, count in runs}) > 1:
        counts = ", ".join(f"{key!r} {count}" for key, count in runs[:8])
        return 1, f"{what} have different numbers of ranks: {counts}"
    return runs[0][1], None


def _ranks_per_card(locations: Sequence[RankLocation], per_host: int) -> tuple[int, str | None]:
    if not all(location.card for location in locations):
        return 1, None
    per_card, reason = _equal_runs(
        [f"{location.host} {location.card}" for location in locations], "cards"
    )
    if reason or per_host % per_card:
        return 1, f"{reason or 'cards span hosts'}; tiles are not distinguished from GPUs"
    return per_card, None


def split_axes(axes: Sequence[Axis]) -> list[Axis]:
    """Splits composite axes of 4 ranks or more in two, largest first, up to three axes in all."""
    split = list(axes)
    whole = sorted(split, key=lambda axis: -axis.size)
    for axis in whole:
        inner = near_square_factor(axis.size)
        if inner > 1 and len(split) < MAX_AXES:
            index = split.index(axis)
            split[index : index + 1] = [
                replace(axis, name=f"{axis.name}.inner", size=inner),
                replace(axis, name=f"{axis.name}.outer", size=axis.size // inner),
            ]
    return split


def near_square_factor(number: int) -> int:
    """Returns the largest factor up to the square root: 24 -> 4, 12 -> 3, 7 -> 1."""
    return next(f for f in range(math.isqrt(number), 0, -1) if number % f == 0)


def location_of_this_rank(device: torch.device) -> RankLocation:
    """Returns host and device of the calling process.

    One torchrun agent is one node, even where several share a host name, as emulated nodes do.
    """
    agent = os.environ.get("GROUP_RANK")
    host = platform.node() + (f"/{agent}" if agent else "")
    properties = properties_of(device)
    if properties is None:
        return RankLocation(host, device.type)
    card = device_kind(device.type).card_of(properties)
    return RankLocation(host, device.type, properties.name, card)


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
