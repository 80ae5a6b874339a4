# SPDX-License-Identifier: Apache-2.0
"""Describes ranks on CPUs that communicate over gloo, whose threads send while a rank computes."""

from __future__ import annotations

from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.kind import DeviceKind, MachineKind, Transport, why_not_built_in
from cocodiff_compile.topology.axes import Link
from cocodiff_compile.topology.presets import GB, MICROSECOND

# What gloo gave between processes of one host, in order of magnitude; the other is 10 Gbit/s.
LOOPBACK = Link("loopback", 1 * GB, 2 * GB, latency_s=500 * MICROSECOND)
ETHERNET = Link("ethernet", 1.25 * GB, 2.5 * GB, latency_s=100 * MICROSECOND)

CPU = DeviceKind(
    name="cpu",
    transports=(Transport("gloo", why_not_built_in("gloo")),),
    remedies="install a torch with gloo",
    guess=Device("cpu, a guess", 60e9, 8e9, 1.0, 0.5, 1.0, 20e-6),
    machine=MachineKind("local", LOOPBACK, LOOPBACK, ETHERNET, 2 * GB),
)
