# SPDX-License-Identifier: Apache-2.0
"""Defines what the compiler needs to know of a kind of device; `cpu.py`, `cuda.py` and `xpu.py`
hold one value each.

A kind says how its ranks communicate and whether they can, what keeps exchanges from overlapping,
which settings Inductor gets, what operations cost, and which devices share a card.
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
    """A transport is a process-group backend of torch.distributed for one kind of device."""

    name: str
    why_not: Callable[[Installed], str]
    """Returns why it cannot be used; an empty string if it can."""
    on_request: str = ""
    """Why it is used only if asked for by name; empty if it may be chosen."""
    legacy_packages: tuple[str, ...] = ()
    """Packages to import before use, where they fit; the last one registers the backend."""


@dataclass(frozen=True)
class MachineKind:
    """Holds default figures of a kind of machine, for links that were not measured."""

    inside: str
    tile: Link
    local: Link
    node: Link
    copy_bytes_per_s: float


@dataclass(frozen=True)
class DeviceKind:
    """Describes one kind of device; `name` is torch's."""

    name: str
    transports: tuple[Transport, ...]
    """The transports in order of preference."""
    remedies: str
    """What to do if no transport can be used."""
    guess: Device
    """The costs of a device that is neither known nor measured."""
    machine: MachineKind
    parts: Mapping[str, Device] = field(default_factory=dict)
    """The costs of known devices, by a word of the name that the driver gives them."""
    blocking_variables: tuple[str, ...] = ()
    """Environment variables that make an exchange block the rank that starts it."""
    inductor_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings while Inductor generates code for a rewritten graph."""
    triton: str = ""
    """The flavour of triton that Inductor's code needs; empty if none."""
    card_of: Callable[[Any], str] = lambda _properties: ""
    """Returns, from its properties, an id that all devices of a card share; empty if unknown."""
    too_few: str = ""
    """What to check where a node has more ranks than devices."""

    def why_no_overlap(self, environment: Mapping[str, str] = os.environ) -> str:
        """Returns which setting keeps exchanges from overlapping; an empty string if none does."""
        for name in self.blocking_variables:
            if environment.get(name, "0") not in ("", "0"):
                return (
                    f"{name}={environment[name]} makes every exchange block its rank, so that "
                    "nothing overlaps with it: schedule-v-first and automatic head chunks are "
                    f"skipped; unset {name}"
                )
        return ""

    def cost_of(self, part: str) -> Device:
        """Returns the costs of a device that the driver calls `part`, without measuring it."""
        known = (figures for word, figures in self.parts.items() if word in part)
        return next(known, self.guess)

    def index_of(self, local_rank: int, count: int) -> int:
        """Returns the index of a rank's device among a node's `count` devices. If only one is
        visible, the launcher has assigned it.
        """
        if count == 1:
            return 0
        if local_rank < count:
            return local_rank
        raise UserError(
            f"local rank {local_rank} has no {self.name} device of its own: {count} are visible; "
            f"start {count} ranks per node{self.too_few}"
        )


def why_not_built_in(name: str) -> Callable[[Installed], str]:
    """Returns a check for a backend that torch is built with or without."""

    def why_not(installed: Installed) -> str:
        return "" if name in installed.built_in else f"torch {installed.torch} is built without it"

    return why_not
