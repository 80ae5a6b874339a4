"""`auto`, first half: the axes of a live group, from where each of its ranks says it runs.

Ranks of one host are neighbours on the node's inside, ranks of one card (the tiles of an XPU)
inside that. An axis that has no structure to see is cut into two near-square factors that share its
link: 24 ranks of one host can exchange as 4 x 6, with 3 + 5 messages per rank instead of 23.
Whether that pays is for the probe to say (`probe.py`); unmeasured, such axes are not parted.

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
class RankPlace:
    """Where one rank runs. `card` is the same for all tiles of a card; empty where unknown."""

    host: str
    device_type: str = "cpu"
    device_name: str = ""
    card: str = ""


@dataclass(frozen=True)
class Detected:
    """The topology of a live group, and what of the machine could not be used, as sentences."""

    topology: Topology
    reasons: tuple[str, ...] = ()


def detect(places: Sequence[RankPlace]) -> Detected:
    """The axes of a group whose ranks, in group order, run at these places; pure."""
    kind = device_kind(places[0].device_type).machine
    per_host, reason = _equal_runs([place.host for place in places], "hosts")
    if reason:
        axes = [Axis("rank", len(places), kind.node)]
        return Detected(_topology(axes, kind), (f"{reason}; ranks are taken as one axis",))
    per_card, reason = _ranks_per_card(places, per_host)
    sizes = [
        ("tile", per_card, kind.tile),
        (kind.inside, per_host // per_card, kind.local),
        ("node", len(places) // per_host, kind.node),
    ]
    axes = [Axis(name, size, link) for name, size, link in sizes if size > 1]
    return Detected(_topology(axes, kind), (reason,) if reason else ())


def _topology(axes: list[Axis], kind: MachineKind) -> Topology:
    return Topology("auto", tuple(split_axes(axes)), kind.copy_bytes_per_s)


def _equal_runs(keys: Sequence[str], what: str) -> tuple[int, str | None]:
    """How many neighbours share a key, if all keys have as many, in one run each; else why not."""
    runs = [(key, len(list(group))) for key, group in groupby(keys)]
    names = [key for key, _ in runs]
    if twice := next((key for key in names if names.count(key) > 1), None):
        ranks = [rank for rank, key in enumerate(keys) if key == twice]
        return 1, f"{what} are interleaved: {twice!r} has ranks {_short(ranks)}"
    if len({count for _, count in runs}) > 1:
        counts = ", ".join(f"{key!r} {count}" for key, count in runs[:8])
        return 1, f"{what} have different numbers of ranks: {counts}"
    return runs[0][1], None


def _ranks_per_card(places: Sequence[RankPlace], per_host: int) -> tuple[int, str | None]:
    if not all(place.card for place in places):
        return 1, None
    per_card, reason = _equal_runs([f"{place.host} {place.card}" for place in places], "cards")
    if reason or per_host % per_card:
        return 1, f"{reason or 'cards span hosts'}; tiles are not told apart from GPUs"
    return per_card, None


def split_axes(axes: Sequence[Axis]) -> list[Axis]:
    """The axes with composite ones of 4 ranks or more halved, the largest first, three in all."""
    found = list(axes)
    whole = sorted(found, key=lambda axis: -axis.size)
    for axis in whole:
        inner = near_square_factor(axis.size)
        if inner > 1 and len(found) < MAX_AXES:
            place = found.index(axis)
            found[place : place + 1] = [
                replace(axis, name=f"{axis.name}.inner", size=inner),
                replace(axis, name=f"{axis.name}.outer", size=axis.size // inner),
            ]
    return found


def near_square_factor(number: int) -> int:
    """The largest factor up to the square root: 24 -> 4, 12 -> 3, 7 -> 1."""
    return next(f for f in range(math.isqrt(number), 0, -1) if number % f == 0)


def place_of_this_rank(device: torch.device) -> RankPlace:
    """Host and device of the calling process.

    One torchrun agent is one node, also where several share a host name, as emulated nodes do.
    """
    agent = os.environ.get("GROUP_RANK")
    host = platform.node() + (f"/{agent}" if agent else "")
    properties = properties_of(device)
    if properties is None:
        return RankPlace(host, device.type)
    card = device_kind(device.type).card_of(properties)
    return RankPlace(host, device.type, properties.name, card)


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
