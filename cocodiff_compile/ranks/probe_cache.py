# SPDX-License-Identifier: Apache-2.0
"""Caches the measurements of a probe on disk, per shape of cluster.

There is one JSON file per key below `$XDG_CACHE_HOME/cocodiff` (or `~/.cache/cocodiff`), in the
format of topology files. A file that cannot be read, or that describes another machine, is ignored;
a folder that cannot be written is logged once. Only the first rank of a group reads or writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.detect import RankLocation
from cocodiff_compile.say_once import say_once
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.files import load_topology, topology_data
from cocodiff_compile.topology.read_plain_data import write_atomically

logger = logging.getLogger(__name__)

SCHEMA = 2
"""Is incremented when the probe measures something else than before."""

PROBE_VARIABLE = "COCODIFF_PROBE"


def probe_wanted() -> bool:
    """Returns False with `COCODIFF_PROBE=0`: the probe neither measures nor reads the cache."""
    value = os.environ.get(PROBE_VARIABLE, "1")
    if value not in ("0", "1"):
        raise UserError(f"{PROBE_VARIABLE} is {value!r}; allowed: 0 (no probe), 1 (the default)")
    return value == "1"


def cache_key(topology: Topology, locations: Sequence[RankLocation], backend: str) -> str:
    """Returns a key that is the same for clusters of one shape, whatever their hosts' names."""
    hosts = list(dict.fromkeys(location.host for location in locations))
    shape = {
        "schema": SCHEMA,
        "machine": topology_data(replace(topology, measured=())),
        "hosts": [hosts.index(location.host) for location in locations],
        "devices": [[location.device_type, location.device_name] for location in locations],
        "backend": backend,
        "torch": str(torch.__version__),
        "cpus": os.cpu_count(),
    }
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:32]


def load(key: str, machine: Topology) -> Topology | None:
    """Returns the topology saved under `key` for `machine`. Returns None if there is none, or if
    the file is no topology, has no measurements, or describes another machine.
    """
    try:
        cached = load_topology(file_of(key))
    except (RuntimeError, ValueError):  # RuntimeError: no home folder
        return None
    is_of_machine = replace(cached, measured=()) == replace(machine, measured=())
    return cached if cached.measured and is_of_machine else None


def save(key: str, topology: Topology) -> None:
    """Writes or replaces the file atomically, so that no reader sees half of it."""
    try:
        path = file_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(topology_data(topology)))
    except (OSError, RuntimeError) as error:
        say_once(logger, logging.WARNING, f"the probe's result cannot be saved: {error}")


def describe_file(key: str) -> str:
    """Returns the file of a key, for a message."""
    try:
        return str(file_of(key))
    except RuntimeError as error:
        return f"no file ({error})"


def file_of(key: str) -> Path:
    """Returns the path of a key. Raises RuntimeError without a cache folder and a home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "cocodiff" / f"probe-{key}.json"
