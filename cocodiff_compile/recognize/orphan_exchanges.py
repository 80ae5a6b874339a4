# SPDX-License-Identifier: Apache-2.0
"""Explains exchanges that no recognised attention touches: of something else or an unknown one."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch.fx import Node

from cocodiff_compile.ir import layout
from cocodiff_compile.ir.aten import BATCHED_MATMUL, MATMUL, is_view, shape_of
from cocodiff_compile.ir.attention_ops import why_no_attention
from cocodiff_compile.ir.collectives import AllToAll
from cocodiff_compile.ir.layout import LayoutUnknown
from cocodiff_compile.ir.module_path import module_path_of
from cocodiff_compile.ir.records import Declined
from cocodiff_compile.recognize.exchanges import Exchanges, before_views, view_path
from cocodiff_compile.recognize.walk import Reached, are_inputs, trace_root, walk_back, walk_forward


def explain_orphans(
    orphans: Sequence[AllToAll], exchanges: Exchanges
) -> tuple[list[Declined], list[Node]]:
    """Sorts exchanges that touch no attention into those that look like Ulysses, with the reason
    why they are declined, and those of something else.
    """
    declined: list[Declined] = []
    explained: set[Node] = set()
    unclaimed = {item.start for item in orphans}
    for item in orphans:
        if item.start in explained:
            continue  # the output exchange of one declined before
        if reason := _orphan_reason(item, exchanges, unclaimed):
            declined.append(Declined(item.start, reason, module_path_of([item.start])))
            explained |= {item.start, *_starts_ahead(item, exchanges, BATCHED_MATMUL)}
    left = [item for item in orphans if item.start not in explained]
    for item in _alone_at_border(left, exchanges):
        declined.append(Declined(item.start, _AT_BORDER, module_path_of([item.start])))
        explained.add(item.start)
    return declined, [item.start for item in left if item.start not in explained]


_AT_BORDER = (
    "what is exchanged comes from outside of this graph, or leaves it, and nothing in it exchanges "
    "it back: if an attention is on the other side, a graph break parts them, `fullgraph=True` "
    "shows where"
)


def _alone_at_border(left: Sequence[AllToAll], exchanges: Exchanges) -> list[AllToAll]:
    """Returns the exchanges that send inputs of the graph or return outputs of it, and that no
    other one of `left` belongs to, unlike those of experts, which send their tokens back.
    """
    starts = {item.start for item in left}
    ahead = {item.start: _starts_ahead(item, exchanges, MATMUL) & starts for item in left}
    behind = set().union(*ahead.values())
    return [
        item
        for item in left
        if not ahead[item.start] and item.start not in behind and _is_at_border(item)
    ]


def _is_at_border(item: AllToAll) -> bool:
    return are_inputs(walk_back(item.source)) or any(
        route.barrier.op == "output" for route in walk_forward(item.wait)
    )


def _orphan_reason(item: AllToAll, exchanges: Exchanges, unclaimed: set[Node]) -> str:
    for route in walk_forward(item.wait):
        other = exchanges.by_start.get(route.barrier)
        if other is not None and other.group == item.group:
            return _between_exchanges(route, other, other.start in unclaimed)
    if not _may_scatter_heads(item):
        return ""
    if any(route.barrier.op == "output" for route in walk_forward(item.wait)):
        return (
            "the exchanged tensor leaves the graph before any attention reads it; a graph break "
            "stands between them, `fullgraph=True` shows where"
        )
    if _is_at_border(item):
        return _AT_BORDER
    return (
        "heads are exchanged, but what reads them is no attention this pass knows: a softmax "
        "between two batched matmuls, one of torch's attention ops, or one that is registered "
        "(cocodiff_compile.register_attention)"
    )


def _between_exchanges(route: Reached, other: AllToAll, is_unclaimed: bool) -> str:
    unknown = [node.target for node in route.path[1:-1] if not is_view(node)]
    between = ", ".join(map(str, unknown)) or "nothing but views"
    if not is_unclaimed:
        return (
            "the exchanged tensor joins the result of an attention before its output exchange, "
            f"by {between}"
        )
    return (
        f"between this exchange and the next over group {other.group!r} stands {between}, no "
        f"attention this pass knows; {_remedy(unknown)}"
    )


def _remedy(unknown: Sequence[Any]) -> str:
    """Returns how an unknown op can be made known: those of torch itself are no attentions."""
    custom = [op for op in unknown if getattr(op, "namespace", "aten") not in ("aten", "prims")]
    if not custom:
        return "use torch's scaled_dot_product_attention"
    for op in custom:
        if reason := why_no_attention(op):
            return f"{op} has the name of one, but {reason}"
    calls = " or ".join(
        f"cocodiff_compile.register_attention(torch.ops.{op}, ...)" for op in custom
    )
    named = f"one of {', '.join(map(str, custom))}" if len(custom) > 1 else str(custom[0])
    return f"if {named} is one, register it: {calls}"


def _starts_ahead(
    item: AllToAll, exchanges: Exchanges, through: Set[object], matmuls: int = 3
) -> set[Node]:
    """Returns exchanges over the same group that the data reach through at most `matmuls` matmuls,
    all of them ops of `through`.
    """
    reached: set[Node] = set()
    begin = [item.wait]
    for _ in range(matmuls + 1):
        barriers = [route.barrier for node in begin for route in walk_forward(node)]
        starts = [exchanges.by_start[node] for node in barriers if node in exchanges.by_start]
        reached |= {start.start for start in starts if start.group == item.group}
        if reached:
            break
        begin = [node for node in barriers if node.target in through]
    return reached


def _may_scatter_heads(item: AllToAll) -> bool:
    """Returns whether an exchange sends columns of a GEMM, as of heads; experts send whole rows."""
    behind = [route for route in walk_back(item.source) if route.barrier.target in MATMUL]
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
