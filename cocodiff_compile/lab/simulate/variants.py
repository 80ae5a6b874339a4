# SPDX-License-Identifier: Apache-2.0
"""Ways of exchanging that are compared: configurations of the backend, by name.

    flat    the plain model shared out and recognised: the exchanges as they are made
    tapa    every exchange in the phases of the paper: innermost axis, then all others at once
    auto    the backend's defaults: the cheapest plan per exchange, and every pass there is
    A | B   every exchange in these phases

The backend chooses the cheapest plan itself. To hold it to one plan, the variant describes the
machine to it with the axes of each phase as one axis, and with links that cost the same per message
and nothing per byte; the finest split is then the cheapest. What each exchange costs is simulated
on the machine as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.passes import PASS_NAMES
from cocodiff_compile.topology.axes import Axis, Link, Topology

FLAT, TAPA, AUTO = "flat", "tapa", "auto"
_SAME_COST = Link("any", bytes_per_s=1e30, both_ways_bytes_per_s=1e30, latency_s=1.0)


def variants_for(topology: Topology, source: str, all_plans: bool) -> dict[str, CompileConfig]:
    """Returns the variants a machine allows. The backend knows it as `source`."""
    auto = CompileConfig.from_options({"topology": source})
    variants = {FLAT: replace(auto, disable=_all_but("recognize-ulysses"))}
    disable = _all_but("recognize-ulysses", "split-tapa-phases")
    for phases in _cuts(topology.axes):
        is_papers = len(phases) == 2 and len(phases[0]) == 1
        if is_papers or all_plans:
            axes = tuple(map(_joined, phases))
            name = " | ".join(axis.name for axis in axes)
            folded = Topology(name, axes, copy_bytes_per_s=1e30)
            variant = replace(auto, topology=folded, tapa="on", disable=disable)
            variants[TAPA if is_papers else name] = variant
    return {**variants, AUTO: auto}


def _all_but(*passes: str) -> tuple[str, ...]:
    return tuple(name for name in PASS_NAMES if name not in ("shard-tokens", *passes))


def _cuts(axes: tuple[Axis, ...]) -> Iterator[list[tuple[Axis, ...]]]:
    """Yields every way to cut the axes, in their order, into two phases or more."""
    for number in range(1, len(axes)):
        for cuts in itertools.combinations(range(1, len(axes)), number):
            yield [axes[a:b] for a, b in itertools.pairwise([0, *cuts, len(axes)])]


def _joined(axes: tuple[Axis, ...]) -> Axis:
    name = "+".join(axis.name for axis in axes)
    return Axis(name, math.prod(axis.size for axis in axes), _SAME_COST)
