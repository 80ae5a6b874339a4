# SPDX-License-Identifier: Apache-2.0
"""Chooses the device that a rank computes on, and the transport that its ranks communicate over.

The device is the one asked for, else CUDA, else XPU, else the CPU. The transport is the one asked
for, else the first usable one of the device; a transport that is used only on request is never a
fallback.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.devices.cuda import CUDA
from cocodiff_compile.devices.installed import Installed
from cocodiff_compile.devices.kind import DeviceKind, Transport
from cocodiff_compile.devices.xpu import XPU
from cocodiff_compile.errors import UserError

TRANSPORT_VARIABLE = "COCODIFF_TRANSPORT"

DEVICE_KINDS = {kind.name: kind for kind in (CUDA, XPU, CPU)}
"""The kinds of devices in order of preference."""


def device_kind(device_type: str) -> DeviceKind:
    """Returns the kind of a torch device type; an unknown type is treated as a CPU."""
    return DEVICE_KINDS.get(device_type, CPU)


def choose_device(installed: Installed, asked: str | None = None) -> DeviceKind:
    if asked is None:
        present = (kind for kind in DEVICE_KINDS.values() if kind.name in installed.device_counts)
        return next(present, CPU)
    if asked not in DEVICE_KINDS:
        raise UserError(f"device {asked!r} is unknown; allowed: {', '.join(DEVICE_KINDS)}")
    if asked != CPU.name and asked not in installed.device_counts:
        raise UserError(f"device {asked!r}: torch {installed.torch} sees none; see cocodiff doctor")
    return DEVICE_KINDS[asked]


def choose_transport(
    device: DeviceKind,
    installed: Installed,
    asked: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Transport:
    """Returns the transport: `asked`, else by the environment, else the usual one of `device`."""
    if wanted := asked or environment.get(TRANSPORT_VARIABLE):
        return _asked_for(device, installed, wanted)
    for transport in device.transports:
        if not transport.on_request and not transport.why_not(installed):
            return transport
    reasons = "; ".join(
        f"{transport.name}: "
        f"{transport.why_not(installed) or f'only on request, {transport.on_request}'}"
        for transport in device.transports
    )
    raise UserError(
        f"no process-group backend for {device.name} ({reasons}). Either {device.remedies}"
        f"{_requestable(device)}"
    )


def _asked_for(device: DeviceKind, installed: Installed, wanted: str) -> Transport:
    known = {transport.name: transport for transport in device.transports}
    if wanted not in known:
        raise UserError(
            f"process-group backend {wanted!r} on {device.name}; allowed: {', '.join(known)} "
            f"(set by the argument backend= or by {TRANSPORT_VARIABLE})"
        )
    if reason := known[wanted].why_not(installed):
        raise UserError(f"process-group backend {wanted!r} on {device.name}: {reason}")
    return known[wanted]


def _requestable(device: DeviceKind) -> str:
    names = [transport.name for transport in device.transports if transport.on_request]
    if not names:
        return ""
    return f"; or ask for {' or '.join(names)} with {TRANSPORT_VARIABLE}={names[0]}"
