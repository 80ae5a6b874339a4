"""Ways of exchanging that are compared: options of the backend, by name.

    flat    recognition alone: the exchanges as the model has them
    tapa    every exchange in the phases of the paper: innermost axis, then all others at once
    auto    the backend's defaults: the cheapest plan per exchange, and every pass there is
    A | B   every exchange in these phases

The backend chooses the cheapest plan itself. To hold it to one plan, the way describes the machine
to it with the axes of each phase as one axis, and with links that cost the same per message and
nothing per byte; the finest split is then the cheapest. What each exchange costs is simulated on
the machine as it is.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from cocodiff_compile.passes import PASS_NAMES
from cocodiff_compile.topology.axes import Axis, Topology

FLAT, TAPA, AUTO = "flat", "tapa", "auto"

Ways: TypeAlias = "dict[str, Mapping[str, Any]]"
_Folded: TypeAlias = "list[tuple[Axis, ...]]"


def ways_for(topology: Topology, source: str, folder: Path, all_plans: bool) -> Ways:
    """Returns the ways a machine allows. The backend knows it as `source`; `folder` takes files."""
    ways: Ways = {FLAT: {"topology": source, "disable": _all_but("recognize-ulysses")}}
    for number, folded in enumerate(_foldings(topology)):
        is_papers = len(folded) == 2 and len(folded[0]) == 1
        if is_papers or all_plans:
            name = TAPA if is_papers else " | ".join(map(_joined_name, folded))
            ways[name] = {
                "topology": str(_write(folded, folder / f"folded_{number}.json")),
                "tapa": "on",
                "disable": _all_but("recognize-ulysses", "split-tapa-phases"),
            }
    ways[AUTO] = {"topology": source}
    return ways


def _all_but(*passes: str) -> list[str]:
    return [name for name in PASS_NAMES if name not in passes]


def _foldings(topology: Topology) -> list[_Folded]:
    """Returns every way to cut the axes, in their order, into two phases or more."""
    axes = topology.axes
    found = []
    for number in range(1, len(axes)):
        for cuts in itertools.combinations(range(1, len(axes)), number):
            edges = [0, *cuts, len(axes)]
            found.append([axes[a:b] for a, b in itertools.pairwise(edges)])
    return found


def _joined_name(axes: tuple[Axis, ...]) -> str:
    return "+".join(axis.name for axis in axes)


def _write(folded: _Folded, path: Path) -> Path:
    machine = {
        "name": path.stem,
        "copy_bytes_per_s": 1e30,
        "links": {"any": {"bytes_per_s": 1e30, "latency_s": 1.0}},
        "axes": [
            {
                "name": _joined_name(axes),
                "size": math.prod(axis.size for axis in axes),
                "link": "any",
            }
            for axes in folded
        ],
    }
    path.write_text(json.dumps(machine))
    return path
