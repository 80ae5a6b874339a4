# SPDX-License-Identifier: Apache-2.0
"""shard-tokens: make Ulysses out of a plain model, each rank of which would compute the same.

Needs     a functional ATen inference graph with values on its nodes, and no collective in it;
          sizes are numbers, or symbolic with numbers of tokens that divide by the ranks; every
          rank is called with the same inputs.
Rewrites  the nodes it is told: each rank computes its share of their tokens. An attention whose
          keys are shared out too gets an all-to-all for query, key, value and output; one whose
          keys are whole reads its share of the queries. What is read as a whole is gathered. The
          number of the rank becomes the last input of the graph.
Keeps     inputs and outputs, which are whole on every rank; values but for the order of sums. With
          `keeps_shares`, outputs that are shared out stay so, and `KEPT_SHARES` of the output node
          says how: another compiled block may read them as they are. Results that show the same
          memory go on to do so.
Declines  nothing: `shard/shares.py` says what can be shared out, `decide/shared_nodes.py` what
          is worth it.

    tokens  [B, N, C] -> my share [B, N/P, C] -> projections -> q, k, v [B, H, N/P, D]
            -> exchanges -> [B, H/P, N, D] -> attention -> exchange -> [B, H, N/P, D] -> ...
            -> gather -> [B, N, C]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import SLICING, emit_contiguous, is_tensor, value_of
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.shard.emit_shares import EmitShares
from cocodiff_compile.shard.gathers import kept_results
from cocodiff_compile.shard.shares import Shared

RANK_INPUT = "rank_in_group"
KEPT_SHARES = "kept_shares"
"""Key of the output node's meta: the cut of each output that is a share, by its place."""


@dataclass(frozen=True)
class ShardTokens:
    """`steps` are the nodes that are shared out over the ranks of `group`."""

    steps: Mapping[Node, Shared]
    group: str
    keeps_shares: bool = False
    name: str = "shard-tokens"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:  # noqa: ARG002
        if not self.steps:
            return PassResult(changed=False)
        kept = kept_results(graph)  # before wholes are read elsewhere
        emitter = EmitShares(graph, self.group, _add_rank_input(graph, self.steps), self.steps)
        for node in list(graph.nodes):
            if node in self.steps:
                with graph.inserting_before(node):
                    emitter.emit(node)
            elif node.op == "output" and self.keeps_shares:
                _keep_shares(node, emitter, kept)
            elif not self._is_left_out(node):
                with graph.inserting_before(node):
                    _read_wholes(node, emitter)
        for node in reversed(list(graph.nodes)):
            if (node in self.steps or self._is_left_out(node)) and not node.users:
                graph.erase_node(node)
        return PassResult(changed=True)

    def _is_left_out(self, node: Node) -> bool:
        """Returns whether a split has shares for results only, which read its input instead."""
        is_split = node.target in SLICING and not is_tensor(node)
        return is_split and all(user in self.steps for user in node.users)


def _add_rank_input(graph: Graph, steps: Iterable[Node]) -> Node:
    """Adds the number of the rank, on the device of what is shared out."""
    last = list(graph.find_nodes(op="placeholder"))[-1]
    like = next(filter(is_tensor, steps))
    with graph.inserting_after(last):
        rank = graph.placeholder(RANK_INPUT)
    with value_of(like).fake_mode:  # type: ignore[attr-defined]
        rank.meta["val"] = torch.zeros(1, dtype=torch.int64, device=value_of(like).device)
    return rank


def _keep_shares(output: Node, emitter: EmitShares, keepable: frozenset[Node]) -> None:
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    shared = {
        place: node
        for place, node in enumerate(results)
        if isinstance(node, Node) and node in emitter.steps and node in keepable
    }
    output.meta[KEPT_SHARES] = {place: emitter.steps[node].cut for place, node in shared.items()}
    with output.graph.inserting_before(output):
        shares = {
            node: emit_contiguous(output.graph, emitter.shares[node])
            for node in dict.fromkeys(shared.values())
        }
        kept = {place: shares[node] for place, node in shared.items()}
        output.args = ([kept.get(place, node) for place, node in enumerate(results)],)
        _read_wholes(output, emitter)


def _read_wholes(node: Node, emitter: EmitShares) -> None:
    for source in node.all_input_nodes:
        if source in emitter.steps:
            node.replace_input_with(source, emitter.whole(source))
