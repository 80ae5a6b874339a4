"""Which device a rank computes on, and which backend its ranks talk over.

A device: the one asked for, else CUDA, else XPU, else the CPU. A backend: the one asked for, else
the first of the device's that can be used; what is for requests only is never fallen back to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.devices.cuda import CUDA
from cocodiff_compile.devices.installed import Installed
from cocodiff_compile.devices.kind import Communication, DeviceBackend
from cocodiff_compile.devices.xpu import XPU
from cocodiff_compile.errors import UserError

COMMUNICATION_VARIABLE = "COCODIFF_COMMUNICATION"

DEVICE_BACKENDS = {backend.name: backend for backend in (CUDA, XPU, CPU)}
"""In order of preference."""


def device_backend(kind: str) -> DeviceBackend:
    """Of a device type of torch; one that is not known is taken for a CPU."""
    return DEVICE_BACKENDS.get(kind, CPU)


def choose_device(installed: Installed, asked: str | None = None) -> DeviceBackend:
    if asked is None:
        there = (item for item in DEVICE_BACKENDS.values() if item.name in installed.device_counts)
        return next(there, CPU)
    if asked not in DEVICE_BACKENDS:
        raise UserError(f"device {asked!r}; allowed: {', '.join(DEVICE_BACKENDS)}")
    if asked != CPU.name and asked not in installed.device_counts:
        raise UserError(f"device {asked!r}: torch {installed.torch} sees none; see cocodiff doctor")
    return DEVICE_BACKENDS[asked]


def choose_communication(
    device: DeviceBackend,
    installed: Installed,
    asked: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Communication:
    """`asked` wins over the environment, both over what is usual on `device`."""
    if wanted := asked or environment.get(COMMUNICATION_VARIABLE):
        return _asked_for(device, installed, wanted)
    for item in device.communications:
        if not item.on_request and not item.why_not(installed):
            return item
    reasons = "; ".join(
        f"{item.name}: {item.why_not(installed) or f'only on request, {item.on_request}'}"
        for item in device.communications
    )
    raise UserError(
        f"no communication backend for {device.name} ({reasons}). Either {device.remedies}"
        f"{_requestable(device)}"
    )


def _asked_for(device: DeviceBackend, installed: Installed, wanted: str) -> Communication:
    known = {item.name: item for item in device.communications}
    if wanted not in known:
        raise UserError(
            f"communication backend {wanted!r} on {device.name}; allowed: {', '.join(known)} "
            f"(the argument backend=, or {COMMUNICATION_VARIABLE})"
        )
    if reason := known[wanted].why_not(installed):
        raise UserError(f"communication backend {wanted!r} on {device.name}: {reason}")
    return known[wanted]


def _requestable(device: DeviceBackend) -> str:
    names = [item.name for item in device.communications if item.on_request]
    if not names:
        return ""
    return f"; or ask for {' or '.join(names)} with {COMMUNICATION_VARIABLE}={names[0]}"
