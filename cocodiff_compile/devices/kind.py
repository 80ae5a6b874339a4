"""What the compiler asks of a kind of device, as one value per kind: `cpu.py`, `cuda.py`, `xpu.py`.

How ranks of it talk and whether they can, how exchanges overlap and what keeps them from it, what
Inductor is told when it gets the graph, what things cost, which devices share a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.installed import Installed
from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Link


@dataclass(frozen=True)
class Transport:
    """A backend of torch.distributed, for tensors of one kind of device."""

    name: str
    why_not: Callable[[Installed], str]
    """Why it cannot be used; empty if it can."""
    on_request: str = ""
    """Why it is used only if asked for by name; empty if it may be chosen."""
    legacy_packages: tuple[str, ...] = ()
    """Imported before it is used, where they fit; the last one registers it."""


@dataclass(frozen=True)
class MachineKind:
    """Default figures of a kind of machine, for what was not measured."""

    inside: str
    tile: Link
    local: Link
    node: Link
    copy_bytes_per_s: float


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device; `name` is torch's."""

    name: str
    transports: tuple[Transport, ...]
    """In order of preference."""
    remedies: str
    """What to do if none of them can be used."""
    guess: Device
    """What things cost on one that is neither known nor measured."""
    machine: MachineKind
    parts: Mapping[str, Device] = field(default_factory=dict)
    """What things cost on known ones, by a word of the name that the driver gives them."""
    blocking_variables: tuple[str, ...] = ()
    """Settings under which an exchange blocks the rank that starts it."""
    inductor_settings: Mapping[str, Any] = field(default_factory=dict)
    """For the time that Inductor makes code of a graph that passes worked on."""
    triton: str = ""
    """The flavour of triton that Inductor's code needs; empty if none."""
    card_of: Callable[[Any], str] = lambda _properties: ""
    """From a device's properties what all devices of its card share; empty if unknown."""
    too_few: str = ""
    """What to look at where a node has more ranks than devices."""

    def why_no_overlap(self, environment: Mapping[str, str] = os.environ) -> str:
        """The setting that keeps exchanges from overlapping; empty if there is none."""
        for name in self.blocking_variables:
            if environment.get(name, "0") not in ("", "0"):
                return (
                    f"{name}={environment[name]} makes every exchange block its rank, so that "
                    "nothing overlaps with it: schedule-v-first and automatic head chunks are "
                    f"skipped; unset {name}"
                )
        return ""

    def cost_of(self, part: str) -> Device:
        """What things cost on a device that calls itself `part`, without measuring it."""
        known = (figures for word, figures in self.parts.items() if word in part)
        return next(known, self.guess)

    def index_of(self, local_rank: int, count: int) -> int:
        """Which of a node's `count` devices a rank takes; one alone is what a launcher left it."""
        if count == 1:
            return 0
        if local_rank < count:
            return local_rank
        raise UserError(
            f"local rank {local_rank} has no {self.name} device of its own: {count} are visible; "
            f"start {count} ranks per node{self.too_few}"
        )


def why_not_built_in(name: str) -> Callable[[Installed], str]:
    """Of a backend that comes with torch or not at all."""

    def why_not(installed: Installed) -> str:
        return "" if name in installed.built_in else f"torch {installed.torch} is built without it"

    return why_not
