# SPDX-License-Identifier: Apache-2.0
"""Examines devices, packages, environment and launcher; imports only torch, and triton."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from cocodiff_compile.compat import TESTED_PYTHON, TESTED_TORCH
from cocodiff_compile.devices.choose import DEVICE_KINDS, choose_device, choose_transport
from cocodiff_compile.devices.installed import Installed, why_not_legacy
from cocodiff_compile.devices.kind import DeviceKind
from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.detect import detect, location_of_this_rank
from cocodiff_compile.ranks.launch.init_distributed import group_backend
from cocodiff_compile.ranks.launch.launchers import Launch, adopt_launcher, find_launch
from cocodiff_compile.ranks.launch.matrix_tiles import SETTING, WITHOUT_TILES, tiles_are_broken

SETTING_PREFIXES = ("CCL_", "COCODIFF_", "FI_", "ZE_")

AURORA_SETTINGS = {
    "CCL_PROCESS_LAUNCHER": "pmix",
    "CCL_ATL_TRANSPORT": "mpi",
    "CCL_KVS_MODE": "mpi",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
    "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
}
"""The settings that Aurora's documentation asks for; other machines with XPUs may need others."""


Status: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""A `problem` keeps ranks from running; a `warning` costs speed, or breaks something else."""


@dataclass(frozen=True)
class Finding:
    """Holds one line of the report."""

    what: str
    status: Status
    text: str


@dataclass(frozen=True)
class Host:
    """Holds what is examined: the installed packages and the environment of a process."""

    installed: Installed
    environment: Mapping[str, str]

    @property
    def device(self) -> DeviceKind:
        return choose_device(self.installed)


def examine(host: Host) -> list[Finding]:
    """Returns all findings, in the order in which they are printed."""
    checks = (
        *(_versions, _devices, _matrix_tiles, _code_generation, _communication, _settings),
        *(_launcher, _topology, _legacy, _untested),
    )
    return [finding for check in checks for finding in check(host)]


def _versions(host: Host) -> Iterator[Finding]:
    for what, version, tested in (
        ("torch", host.installed.torch, TESTED_TORCH),
        ("python", platform.python_version(), (TESTED_PYTHON,)),
    ):
        own = f"{version.partition('+')[0]}."
        is_tested = any(own.startswith(f"{item}.") for item in tested)
        text = "a version tested" if is_tested else f"never tested; tested: {', '.join(tested)}"
        yield Finding(what, "ok" if is_tested else "note", f"{version}, {text}")


def _devices(host: Host) -> Iterator[Finding]:
    counts = host.installed.device_counts
    absent = [f"no {name}" for name in DEVICE_KINDS if name != "cpu" and name not in counts]
    present = [f"{count} {name}" for name, count in counts.items()] or ["cpu"]
    yield Finding("device", "ok", ", ".join([*present, *(f"{name} device" for name in absent)]))


def _matrix_tiles(host: Host) -> Iterator[Finding]:
    is_asked = host.device.name == "cpu" and SETTING not in host.environment
    if is_asked and tiles_are_broken():
        text = "the processor announces AMX, but bfloat16 matmuls are illegal instructions; run: "
        yield Finding("AMX", "warning", f"{text}export {SETTING}={WITHOUT_TILES}")


def _code_generation(host: Host) -> Iterator[Finding]:
    wanted = host.device.triton
    if not wanted:
        name = host.environment.get("CXX", "g++")
        path = shutil.which(name)
        missing = f"{name} is missing: install a C++ compiler, which Inductor needs for CPU code"
        yield Finding("C++ compiler", "ok" if path else "problem", path or missing)
    if find_spec("triton") is None:
        text = f"not installed{', Inductor needs it' if wanted else '; CPU code needs none'}"
        yield Finding("triton", "problem" if wanted else "ok", text)
        return
    yield _triton(wanted)


def _triton(wanted: str) -> Finding:
    try:
        flavours = sorted(import_module("triton.backends").backends)
    except Exception as error:  # whatever a package that does not fit raises
        status: Status = "problem" if wanted else "warning"
        return Finding("triton", status, f"cannot be imported: {error!r}")
    text = f"for {', '.join(flavours) or 'nothing'}"
    if wanted and wanted not in flavours:
        remedy = "install the triton of torch's own index"
        return Finding("triton", "problem", f"{text}, not for {wanted}: {remedy}")
    return Finding("triton", "ok", text)


def _communication(host: Host) -> Iterator[Finding]:
    installed, device = host.installed, host.device
    for kind in DEVICE_KINDS.values():
        for transport in kind.transports:
            reason = transport.why_not(installed)
            text = f"absent: {reason}" if reason else "usable"
            if transport.on_request and not reason:
                text = f"only on request: {transport.on_request}"
            what = f"{kind.name} over {transport.name}"
            yield Finding(what, "note" if reason else "ok", text)
    try:
        chosen = choose_transport(device, installed, None, host.environment)
    except UserError as error:
        yield Finding("chosen", "problem", str(error))
        return
    name = group_backend(device, chosen, installed)
    yield Finding("chosen", "ok", f"{device.name}, process group {name!r}")


def _settings(host: Host) -> Iterator[Finding]:
    environment = host.environment
    for kind in DEVICE_KINDS.values():
        reason = kind.why_no_overlap(environment)
        if reason:
            yield Finding("overlap", "warning", f"on {kind.name}, {reason}")
    shown = [name for name in sorted(environment) if name.startswith(SETTING_PREFIXES)]
    text = ", ".join(f"{name}={environment[name]}" for name in shown)
    yield Finding("settings", "ok", text or "no CCL_*, COCODIFF_*, FI_* or ZE_* is set")
    if host.device.name == "xpu":
        wanted = AURORA_SETTINGS.items()
        other = [f"{name}={value}" for name, value in wanted if environment.get(name) != value]
        if other:
            yield Finding("Aurora wants", "note", ", ".join(other))


def _launcher(host: Host) -> Iterator[Finding]:
    try:
        launch = find_launch(host.environment)
        if launch is None:
            text = "none: start ranks with torchrun, mpiexec or srun"
            yield Finding("launcher", "note", text)
            return
        meeting = dict(host.environment)
        adopt_launcher(meeting)
        if (count := host.installed.device_counts.get(host.device.name)) is not None:
            host.device.index_of(launch.local_rank, count)
    except UserError as error:
        yield Finding("launcher", "problem", str(error))
        return
    where = f"{meeting['MASTER_ADDR']}:{meeting['MASTER_PORT']}"
    text = f"{launch.launcher}: rank {launch.rank} of {launch.num_ranks}, local rank "
    text += f"{launch.local_rank} of {launch.ranks_here}; the store is at {where}"
    yield Finding("launcher", "ok", text)


def _topology(host: Host) -> Iterator[Finding]:
    kind = host.device.name
    devices = host.installed.device_counts.get(kind, 1)
    launch = Launch("", 0, devices, 0, devices)
    with suppress(UserError):
        launch = find_launch(host.environment) or launch
    if launch.num_ranks < 2:
        yield Finding("topology", "note", "one rank, nothing to exchange")
        return
    local = [torch.device(kind, rank % devices) for rank in range(launch.ranks_here)]
    here = [location_of_this_rank(device) for device in local]
    nodes = range(max(1, launch.num_ranks // launch.ranks_here))
    ranks = [replace(rank, host=f"{rank.host} {node}") for node in nodes for rank in here]
    detected = detect(ranks)
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in detected.topology.axes)
    text = "; ".join([f"estimated, not measured: {axes}", *detected.reasons])
    yield Finding("topology", "ok", text)


def _legacy(host: Host) -> Iterator[Finding]:
    for package, version in host.installed.packages.items():
        reason = why_not_legacy(package, host.installed)
        if reason:
            text = f"{reason} by cocodiff, but fails where it is imported: pip uninstall {package}"
            yield Finding("legacy", "warning", text)
        else:
            yield Finding("legacy", "ok", f"{package} {version} fits this torch")
    if not host.installed.packages:
        yield Finding("legacy", "ok", "no intel-extension-for-pytorch, no oneccl-bind-pt")


def _untested(host: Host) -> Iterator[Finding]:
    if host.device.name == "cpu":
        text = "XPU and CUDA have never been run; the tests run on CPU and gloo"
    else:
        text = f"{host.device.name}: exactness, order and speed are untested on it; see docs/xpu.md"
    yield Finding("untested", "note", text)
