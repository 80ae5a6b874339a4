# SPDX-License-Identifier: Apache-2.0
"""Describes the machine and the software of a run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cocodiff_compile

SCHEMA = 2
_PACKAGES = ("cocodiff-compile", "torch", "diffusers", "cache-dit")


def new_run() -> dict[str, Any]:
    """Returns a run without results, in the format of the JSON file."""
    files = sorted(Path(cocodiff_compile.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return {
        "schema": SCHEMA,
        "machine": describe_machine(),
        "taken with": {**_versions(), "code": code},
        "results": [],
    }


def describe_machine() -> dict[str, Any]:
    """Returns the machine, the time and the software of a run."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **_versions(),
        "threads per rank": os.environ.get("OMP_NUM_THREADS", "1"),
        "load average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    """Returns the versions of the installed packages."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
