# SPDX-License-Identifier: Apache-2.0
"""Finds the GEMMs around exchanges, and the columns of a fused one that belong to a leg."""

from __future__ import annotations

import math

from torch.fx import Node

from cocodiff_compile.ir.aten import PROJECTION, bound, is_concatenation, shape_of
from cocodiff_compile.ir.layout import Size, same
from cocodiff_compile.ir.records import Projection
from cocodiff_compile.recognize.walk import Cut, Reached, trace_root, walk_back, walk_forward


def projections_before(source: Node, part: Cut | None, batch: Size) -> tuple[Projection, ...]:
    """Returns the GEMMs whose rows make up `source`, or the `part` of it that one role owns."""
    projections: dict[Node, Projection] = {}
    for begin in _owners(source, part):
        for reached in walk_back(begin):
            if reached.barrier.target in PROJECTION and reached.barrier not in projections:
                its_part = part if begin is source else None
                projections[reached.barrier] = _projection(reached, its_part)
    ordered = sorted(projections.values(), key=lambda item: item.node)
    return _without_modulation(tuple(ordered), batch)


def projections_after(wait: Node) -> tuple[Projection, ...]:
    """Returns the GEMMs that read the result of an output exchange."""
    gemms = [route.barrier for route in walk_forward(wait) if route.barrier.target in PROJECTION]
    shapes = map(shape_of, gemms)
    return tuple(
        Projection(node, math.prod(shape[:-1]), shape[-1], columns=None)
        for node, shape in zip(gemms, shapes, strict=True)
    )


def _owners(source: Node, part: Cut | None) -> list[Node]:
    """Returns the operands of a packing concatenation that `part` covers, else `source` itself."""
    if part is None or not is_concatenation(source):
        return [source]
    tensors = bound(source)["tensors"]
    dim = bound(source).get("dim", 0) % len(shape_of(source))
    if dim != part.root_dim:
        return [source]
    owners, start = [], 0
    for tensor in tensors:
        length = shape_of(tensor)[dim]
        inside = start >= part.start and start + length <= part.start + part.length
        if inside:
            owners.append(tensor)
        start = start + length
    return owners or [source]


def _projection(reached: Reached, part: Cut | None) -> Projection:
    shape = shape_of(reached.barrier)
    last = len(shape) - 1
    cuts = [cut for cut in trace_root(reached.path).cuts if cut.root_dim == last]
    if not cuts and part is not None and part.root_dim == last and len(reached.path) == 1:
        cuts = [part]
    columns = (cuts[-1].start, cuts[-1].start + cuts[-1].length) if cuts else None
    return Projection(reached.barrier, math.prod(shape[:-1]), shape[-1], columns)


def _without_modulation(projections: tuple[Projection, ...], batch: Size) -> tuple[Projection, ...]:
    """Drops GEMMs with one row per sample if others have more: they compute scales."""
    tokens = tuple(item for item in projections if not same(item.rows, batch))
    return tokens or projections
