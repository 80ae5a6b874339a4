"""What the doctor looks at. Nothing is imported to find out but torch, and triton where it is."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import torch

from cocodiff_compile.compat import TESTED_PYTHON, TESTED_TORCH
from cocodiff_compile.devices.choose import (
    DEVICE_BACKENDS,
    choose_communication,
    choose_device,
)
from cocodiff_compile.devices.installed import Installed, why_not_legacy
from cocodiff_compile.devices.kind import DeviceBackend
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.doctor.finding import Finding, Status
from cocodiff_compile.ranks.detect import detect, place_of_this_rank
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
"""What its documentation asks for; other machines with XPUs may want others."""


@dataclass(frozen=True)
class Patient:
    """What is examined: installed packages, and the environment of a process."""

    installed: Installed
    environment: Mapping[str, str]

    @property
    def device(self) -> DeviceBackend:
        return choose_device(self.installed)


def examine(patient: Patient) -> list[Finding]:
    """All findings, in the order of the screen."""
    return [finding for look in _LOOKS for finding in look(patient)]


def _versions(patient: Patient) -> Iterator[Finding]:
    for what, found, tested in (
        ("torch", patient.installed.torch, TESTED_TORCH),
        ("python", platform.python_version(), TESTED_PYTHON),
    ):
        is_tested = f"{found.partition('+')[0]}.".startswith(f"{tested}.")
        text = "the version tested" if is_tested else f"never tested; tested: {tested}"
        yield Finding(what, "ok" if is_tested else "note", f"{found}, {text}")


def _devices(patient: Patient) -> Iterator[Finding]:
    counts = patient.installed.device_counts
    absent = [f"no {name}" for name in DEVICE_BACKENDS if name != "cpu" and name not in counts]
    found = [f"{count} {name}" for name, count in counts.items()] or ["cpu"]
    yield Finding("device", "ok", ", ".join([*found, *(f"{name} device" for name in absent)]))


def _matrix_tiles(patient: Patient) -> Iterator[Finding]:
    is_asked = patient.device.name == "cpu" and SETTING not in patient.environment
    if is_asked and tiles_are_broken():
        text = "bfloat16 matmuls die here of an illegal instruction, AMX is announced and does not "
        yield Finding("AMX", "warning", f"{text}run: export {SETTING}={WITHOUT_TILES}")


def _code_generation(patient: Patient) -> Iterator[Finding]:
    wanted = patient.device.triton
    if not wanted:
        name = patient.environment.get("CXX", "g++")
        path = shutil.which(name)
        missing = f"{name} is not there: install a C++ compiler, Inductor needs one for CPU code"
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


def _communication(patient: Patient) -> Iterator[Finding]:
    installed, device = patient.installed, patient.device
    for item in DEVICE_BACKENDS.values():
        for way in item.communications:
            reason = way.why_not(installed)
            text = f"absent: {reason}" if reason else "usable"
            if way.on_request and not reason:
                text = f"only on request: {way.on_request}"
            yield Finding(f"{item.name} over {way.name}", "ok" if not reason else "note", text)
    try:
        chosen = choose_communication(device, installed, None, patient.environment)
    except UserError as error:
        yield Finding("chosen", "problem", str(error))
        return
    name = group_backend(device, chosen, installed)
    yield Finding("chosen", "ok", f"{device.name}, process group {name!r}")


def _settings(patient: Patient) -> Iterator[Finding]:
    environment = patient.environment
    for item in DEVICE_BACKENDS.values():
        reason = item.why_no_overlap(environment)
        if reason:
            yield Finding("overlap", "warning", f"on {item.name}, {reason}")
    shown = [name for name in sorted(environment) if name.startswith(SETTING_PREFIXES)]
    text = ", ".join(f"{name}={environment[name]}" for name in shown)
    yield Finding("settings", "ok", text or "no CCL_*, COCODIFF_*, FI_* or ZE_* is set")
    if patient.device.name == "xpu":
        other = [
            f"{name}={value}"
            for name, value in AURORA_SETTINGS.items()
            if environment.get(name) != value
        ]
        if other:
            yield Finding("Aurora wants", "note", ", ".join(other))


def _launcher(patient: Patient) -> Iterator[Finding]:
    try:
        launch = find_launch(patient.environment)
        if launch is None:
            text = "none: start ranks with torchrun, mpiexec or srun"
            yield Finding("launcher", "note", text)
            return
        meeting = dict(patient.environment)
        adopt_launcher(meeting)
        if (count := patient.installed.device_counts.get(patient.device.name)) is not None:
            patient.device.index_of(launch.local_rank, count)
    except UserError as error:
        yield Finding("launcher", "problem", str(error))
        return
    where = f"{meeting['MASTER_ADDR']}:{meeting['MASTER_PORT']}"
    text = f"{launch.launcher}: rank {launch.rank} of {launch.num_ranks}, local rank "
    text += f"{launch.local_rank} of {launch.ranks_here}; they meet at {where}"
    yield Finding("launcher", "ok", text)


def _topology(patient: Patient) -> Iterator[Finding]:
    kind = patient.device.name
    try:
        launch = find_launch(patient.environment)
    except UserError:
        launch = None
    devices = patient.installed.device_counts.get(kind, 1)
    launch = launch or Launch("", 0, devices, 0, devices)
    if launch.num_ranks < 2:
        yield Finding("topology", "note", "one rank, nothing to exchange")
        return
    here = [
        place_of_this_rank(torch.device(kind, rank % devices)) for rank in range(launch.ranks_here)
    ]
    nodes = range(max(1, launch.num_ranks // launch.ranks_here))
    places = [replace(place, host=f"{place.host} {node}") for node in nodes for place in here]
    found = detect(places)
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in found.topology.axes)
    yield Finding("topology", "ok", "; ".join([f"a guess, not measured: {axes}", *found.reasons]))


def _legacy(patient: Patient) -> Iterator[Finding]:
    for package, version in patient.installed.packages.items():
        reason = why_not_legacy(package, patient.installed)
        if reason:
            text = f"{reason} by cocodiff, but breaks what imports it: pip uninstall {package}"
            yield Finding("legacy", "warning", text)
        else:
            yield Finding("legacy", "ok", f"{package} {version} fits this torch")
    if not patient.installed.packages:
        yield Finding("legacy", "ok", "no intel-extension-for-pytorch, no oneccl-bind-pt")


def _untested(patient: Patient) -> Iterator[Finding]:
    if patient.device.name == "cpu":
        text = "XPU and CUDA: never run. CPU and gloo are what the tests run on"
    else:
        text = f"{patient.device.name}: all of it, exactness, order and speed; see docs/xpu.md"
    yield Finding("untested", "note", text)


_LOOKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    _matrix_tiles,
    _code_generation,
    _communication,
    _settings,
    _launcher,
    _topology,
    _legacy,
    _untested,
)
