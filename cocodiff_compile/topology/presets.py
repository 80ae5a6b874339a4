# SPDX-License-Identifier: Apache-2.0
"""Defines known machines by name, sized to a group of ranks.

Figures are published ones unless noted; none was measured by this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Axis, Link, Topology

GB = 1e9
MICROSECOND = 1e-6

# Aurora. Speeds per link from arXiv 2604.14561. Four constants are fitted to its micro-benchmark of
# one node (48 MB per rank: flat 25.5 ms, tile phase 0.5, GPU phase 6.0; 24 MB: flat 3.0 times the
# phases; 6 MB: equal): the latencies of the tile and the Xe Link, the share of an Xe Link that one
# tile gets while both send, and the size from which unaligned traffic slows down.
TILE = Link("tile", 185 * GB, 269 * GB, latency_s=300 * MICROSECOND)
XE_LINK = Link(
    "xe-link",
    15 * GB,
    23 * GB,
    latency_s=30 * MICROSECOND,
    ranks_per_link=1.68,
    unaligned_from_bytes=6e6,
)
# 8 NICs for 12 ranks; the latency is assumed, and that unaligned traffic slows down as on Xe Link.
SLINGSHOT = Link(
    "slingshot-11",
    20 * GB,
    40 * GB,
    latency_s=30 * MICROSECOND,
    ranks_per_link=1.5,
    unaligned_from_bytes=6e6,
)

# DGX H100: NVLink 4 and one 400 Gbit/s NIC per GPU; latencies are assumed.
NVLINK = Link("nvlink", 450 * GB, 900 * GB, latency_s=3 * MICROSECOND)
INFINIBAND = Link("infiniband-ndr", 50 * GB, 100 * GB, latency_s=8 * MICROSECOND)

ANY = Link("any", 10 * GB, 20 * GB, latency_s=20 * MICROSECOND)

_INSIDE_A_NODE: dict[str, list[tuple[str, int, Link]]] = {
    "aurora": [("tile", 2, TILE), ("gpu", 6, XE_LINK)],
    "dgx-h100": [("gpu", 8, NVLINK)],
    "flat": [],
}
"""The axes of each preset, their sizes in a full node, and their links, innermost first."""


def aurora(num_ranks: int) -> Topology:
    """Returns 2 tiles x 6 GPUs x nodes; less than a node is 2 tiles x some GPUs."""
    return _fill("aurora", num_ranks, SLINGSHOT, copy_bytes_per_s=1000 * GB)


def dgx_h100(num_ranks: int) -> Topology:
    """Returns 8 GPUs x nodes."""
    return _fill("dgx-h100", num_ranks, INFINIBAND, copy_bytes_per_s=3000 * GB)


def flat(num_ranks: int) -> Topology:
    """Returns a single axis, which cannot be split into phases."""
    return Topology("flat", (Axis("rank", num_ranks, ANY),), copy_bytes_per_s=10 * GB)


PRESETS: dict[str, Callable[[int], Topology]] = {
    "aurora": aurora,
    "dgx-h100": dgx_h100,
    "flat": flat,
}


def ranks_per_node(preset: str) -> int:
    """Returns the ranks of a full node; without levels inside of a node, every rank is one."""
    return math.prod(size for _, size, _ in _INSIDE_A_NODE[preset])


def _fill(name: str, num_ranks: int, between_nodes: Link, copy_bytes_per_s: float) -> Topology:
    """Fills levels from the inside out until the ranks are used up; nodes take the rest."""
    levels, axes, left = _INSIDE_A_NODE[name], [], num_ranks
    for axis_name, size, link in levels:
        wanted = min(size, left)
        if left % wanted:
            full = " x ".join(str(level[1]) for level in levels)
            raise UserError(
                f"topology {name!r} is {full} x nodes: {num_ranks} ranks do not fill whole levels "
                "of it"
            )
        axes.append(Axis(axis_name, wanted, link))
        left //= wanted
    axes.append(Axis("node", left, between_nodes))
    return Topology(name, tuple(axis for axis in axes if axis.size > 1), copy_bytes_per_s)
