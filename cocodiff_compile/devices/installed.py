# SPDX-License-Identifier: Apache-2.0
"""Records what this Python and this machine have: the devices that torch sees, the process-group
backends it was built with, and legacy packages.

Versions are read from metadata; nothing but torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed as dist

LEGACY_PACKAGES = {
    "intel-extension-for-pytorch": "intel_extension_for_pytorch",
    "oneccl-bind-pt": "oneccl_bindings_for_pytorch",
}
"""Intel's packages from before torch had XPU and xccl of its own: distribution -> module."""

_BUILT_IN: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": dist.is_nccl_available,
    "xccl": dist.is_xccl_available,
}


@dataclass(frozen=True)
class Installed:
    """Holds `device_counts` of the accelerators that exist, torch's own process-group backends in
    `built_in`, and the version of each installed legacy package in `packages`.
    """

    torch: str
    device_counts: Mapping[str, int] = field(default_factory=dict)
    built_in: frozenset[str] = frozenset({"gloo"})
    packages: Mapping[str, str] = field(default_factory=dict)


_ACCELERATORS: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}


def installed_here() -> Installed:
    """Returns what this process finds."""
    counts = {kind: module.device_count() for kind, module in _ACCELERATORS.items()}
    return Installed(
        torch=torch.__version__,
        device_counts={kind: count for kind, count in counts.items() if count},
        built_in=frozenset(name for name, is_there in _BUILT_IN.items() if is_there()),
        packages=legacy_versions(),
    )


def properties_of(device: torch.device) -> Any:
    """Returns the driver's properties of an accelerator; None for a CPU or an absent device."""
    module = _ACCELERATORS.get(device.type)
    if module is None or not module.is_available():
        return None
    return module.get_device_properties(device)


def legacy_versions() -> dict[str, str]:
    """Returns the versions of the installed legacy packages."""
    versions: dict[str, str] = {}
    for package in LEGACY_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def why_not_legacy(package: str, installed: Installed) -> str:
    """Returns why a legacy package must not be imported; an empty string if it may.

    Release x.y is built for torch x.y and does not pin it: with another torch its import fails with
    an arbitrary error.
    """
    if package not in installed.packages:
        return f"{package} is not installed"
    package_version = installed.packages[package]
    if _series(package_version) == _series(installed.torch):
        return ""
    return (
        f"{package} {package_version} is made for torch {_series(package_version)}, this is "
        f"{installed.torch}: never imported"
    )


def _series(text: str) -> str:
    """Returns the major and minor version: 2.8.0+xpu -> 2.8."""
    return ".".join(text.partition("+")[0].split(".")[:2])
