"""Exchanges that no attention touches: of something else, or of an attention nobody could see."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from cocodiff_compile.graph import layout
from cocodiff_compile.graph.aten import MATMUL, AllToAll, is_view, shape_of
from cocodiff_compile.graph.exchanges import Exchanges, before_views, view_path
from cocodiff_compile.graph.layout import LayoutUnknown
from cocodiff_compile.graph.module_path import module_path_of
from cocodiff_compile.graph.records import Declined
from cocodiff_compile.graph.walk import Reached, trace_root, walk_back, walk_forward


def explain_orphans(
    orphans: Sequence[AllToAll], exchanges: Exchanges
) -> tuple[list[Declined], list[Node]]:
    """Of exchanges that touch no attention: those that look like Ulysses all the same, and why it
    is not taken; and those of something else.
    """
    declined: list[Declined] = []
    explained: set[Node] = set()
    for item in orphans:
        for way in walk_forward(item.wait):
            if reason := _orphan_reason(item, way, exchanges):
                declined.append(Declined(item.start, reason, module_path_of([item.start])))
                explained |= {item.start, way.barrier}
                break
    return declined, [item.start for item in orphans if item.start not in explained]


def _orphan_reason(item: AllToAll, way: Reached, exchanges: Exchanges) -> str:
    if way.barrier.op == "output" and _may_scatter_heads(item):
        return (
            "the exchanged tensor leaves the graph before any attention reads it; a graph break "
            "stands between them, `fullgraph=True` shows where"
        )
    other = exchanges.by_start.get(way.barrier)
    if other is None or other.group != item.group:
        return ""
    unknown = [node.target for node in way.path[1:-1] if not is_view(node)]
    between = ", ".join(map(str, unknown)) or "nothing but views"
    return (
        f"between this exchange and the next over group {other.group!r} stands {between}, no "
        "attention this pass knows; use torch's scaled_dot_product_attention"
    )


def _may_scatter_heads(item: AllToAll) -> bool:
    """Whether an exchange sends columns of a GEMM, as heads are; experts exchange whole rows."""
    behind = [way for way in walk_back(item.source) if way.barrier.target in MATMUL]
    path = behind[0].path if behind else view_path(before_views(item.source), item.source)
    packed = trace_root(path)
    if packed.stopped_by:
        return True  # more than rows passed on: norms, rotations
    try:
        scattered, _ = layout.exchange(packed.dims, item.num_ranks)
    except LayoutUnknown:
        return False
    columns = len(shape_of(path[0])) - 1
    return scattered.source == columns if behind else scattered.source > 0
