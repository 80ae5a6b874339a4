# SPDX-License-Identifier: Apache-2.0
"""Refuses attentions with exchanges that are no Ulysses, by checks that need no layouts."""

from __future__ import annotations

from torch.fx import Node

from cocodiff_compile.compat import group_ranks
from cocodiff_compile.ir.aten import bound, value_of
from cocodiff_compile.ir.collectives import AllToAll
from cocodiff_compile.recognize.attention_cores import AttentionCore
from cocodiff_compile.recognize.exchanges import Surroundings

ROLE_NAMES = {"q": "query", "k": "key", "v": "value", "o": "result"}

GRAPH_BREAK = "if its exchange is there, a graph break parts them, `fullgraph=True` shows where"

OUTSIDE = (
    "query, key and value of this attention come from outside of this graph: if they are exchanged "
    "there, a graph break parts them, as torch.distributed.all_to_all with lists makes one; "
    "`fullgraph=True` shows where"
)


class Refused(Exception):
    """Reports that an attention is no Ulysses that is supported, with the node and the reason."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def refuse_missing(core: AttentionCore, around: Surroundings) -> None:
    """Raises Refused unless query, key, value and result have one all-to-all each."""
    for role, routes in around.input_routes.items():
        name = ROLE_NAMES[role]
        if not routes:
            raise Refused(
                core.nodes[0],
                _why_missing(name, around.collectives.get(role), role in around.from_outside),
            )
        if len(routes) > 1:
            names = ", ".join(route.barrier.name for route in routes)
            raise Refused(
                routes[1].barrier,
                f"the {name} is joined from {len(routes)} all-to-alls ({names}); "
                "join its parts before one exchange",
            )
    if not around.output_routes:
        leaves = f"; it leaves the graph: {GRAPH_BREAK}" if around.leaves_graph else ""
        raise Refused(
            core.output,
            f"the result of this attention is not exchanged back by an all-to-all{leaves}",
        )
    if len(around.output_routes) > 1:
        starts = [route.barrier.name for route in around.output_routes]
        raise Refused(
            around.output_routes[1].barrier,
            f"the result goes into {len(starts)} all-to-alls ({', '.join(starts)}), not into one",
        )


def _why_missing(name: str, collective: Node | None, is_from_outside: bool) -> str:
    if collective is not None:
        return (
            f"between an exchange and the {name} of this attention stands {collective.target} "
            f"over group {bound(collective).get('group_name')!r}; Ulysses together with ring or "
            "gathered attention is not supported"
        )
    if is_from_outside:
        return (
            f"the {name} of this attention comes from no all-to-all of this graph, other parts of "
            f"it do; it comes from outside: {GRAPH_BREAK}"
        )
    return (
        f"the {name} of this attention comes from no all-to-all, other parts of it do; exchange "
        "query, key and value alike"
    )


def common_ranks(all_to_alls: list[AllToAll]) -> tuple[int, ...]:
    """Returns the ranks that exchange floats in equal blocks. Raises Refused for anything else."""
    first = all_to_alls[0]
    for item in all_to_alls:
        if item.group != first.group:
            raise Refused(
                item.start,
                f"exchanges run over different groups, {first.group!r} and {item.group!r}",
            )
        if not item.has_equal_splits:
            raise Refused(
                item.start,
                f"unequal splits {list(item.input_splits)} -> {list(item.output_splits)}; "
                "pad tokens and heads so that they divide by the number of ranks",
            )
        if not value_of(item.source).dtype.is_floating_point:
            raise Refused(
                item.start, f"the exchange carries {value_of(item.source).dtype}, not floats"
            )
    ranks = group_ranks(first.group)
    if ranks is None:
        raise Refused(first.start, f"process group {first.group!r} is not known to this process")
    if len(ranks) != first.num_ranks:
        raise Refused(
            first.start,
            f"{first.num_ranks} splits for the {len(ranks)} ranks of group {first.group!r}",
        )
    if len(ranks) == 1:
        raise Refused(first.start, f"group {first.group!r} has one rank: nothing to exchange")
    return ranks
