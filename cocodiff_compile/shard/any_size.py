# SPDX-License-Identifier: Apache-2.0
"""Prepares a graph with symbolic sizes for shares: what is shared out must divide by the ranks.

A graph that Dynamo captures for any size is shared out as it is if all symbolic numbers of tokens
divide by the ranks in the call that it is captured with. Whether they do becomes a guard of the
graph: Dynamo captures a call for which that differs anew, and finds the right one of both later.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import has_free_unbacked_symbols, terms_of
from cocodiff_compile.ir.aten import aten, is_tensor, parse_fused_attention, shape_of, value_of
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.size_nodes import SizeNodes


def is_for_any_size(graph: Graph) -> bool:
    """Returns whether a size of a graph is symbolic."""
    values = (value_of(node) for node in graph.nodes if is_tensor(node))
    return any(isinstance(size, torch.SymInt) for value in values for size in value.shape)


def depends_on_values(graph: Graph) -> bool:
    """Returns whether a size of a graph is not known before it runs."""
    return any(has_free_unbacked_symbols(value_of(node)) for node in graph.nodes if is_tensor(node))


def prepare_for_shares(graph: Graph, num_ranks: int) -> bool:
    """Makes the symbolic numbers of tokens divide by the ranks, and sizes that are read from what
    may be shared out come from the inputs. Returns False if one does not divide.
    """
    counts = _token_counts(graph)
    if not all(_guarded(term, num_ranks) for count in counts for term in terms_of(count)):
        return False
    for count in counts:
        _guarded(count, num_ranks)
    sizes = SizeNodes(graph)
    read = graph.find_nodes(op="call_function", target=aten.sym_size.int)
    for node, size in [(node, sizes.argument(node.meta["val"])) for node in read]:
        if isinstance(size, Node):
            node.replace_all_uses_with(size)
            graph.erase_node(node)
    return True


def _guarded(count: torch.SymInt, num_ranks: int) -> bool:
    """Returns whether a number divides by the ranks, and makes that a guard."""
    return bool(count % num_ranks == 0)


def _token_counts(graph: Graph) -> list[torch.SymInt]:
    """Returns the symbolic numbers of queries of attentions. Keys need not divide: those that do
    not are read as a whole.
    """
    counts = []
    for node in graph.nodes:
        if is_attention(node.target):
            attention = parse_fused_attention(node)
            counts.append(shape_of(attention.query)[attention.op.token_dim])
    return [count for count in counts if isinstance(count, torch.SymInt)]
