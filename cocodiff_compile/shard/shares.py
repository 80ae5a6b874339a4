# SPDX-License-Identifier: Apache-2.0
"""Says how each rank computes its share of a node: what it reads as shares, and what as a whole.

Whether that is right depends on one node alone: its rule in `cut/rules.py`, or what is said about
attentions here. What was proposed elsewhere in a graph cannot make it wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch.fx import Node

from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.cut.rules import (
    cut_of_operand,
    parse_repeatable,
    refuse_other_operands,
    step_cut,
)
from cocodiff_compile.ir.aten import FusedAttention, aten, bound, shape_of, value_of
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.layout import divides, same, static_size
from cocodiff_compile.shard.gathers import is_carried
from cocodiff_compile.shard.wanted_cuts import slicing_of, wanted_cuts
from cocodiff_compile.shard.whole_of_shares import WHOLE, whole_cut


class AttentionMode(Enum):
    """Lists how ranks that have a share of the queries can compute an attention."""

    ULYSSES = "Ulysses"
    """All tokens of some heads, between exchanges of query, key, value and output."""
    CROSS = "cross"
    """All heads of some queries, with all keys and values on every rank."""
    BATCH = "batch"
    """Some samples, which see nothing of the others."""


@dataclass(frozen=True)
class Shared:
    """Says how each rank computes its share of a node."""

    cut: Cut
    needs: Mapping[Node, Cut] = field(default_factory=dict)
    """The operands of which a rank reads its share; it reads the others as a whole."""
    mode: AttentionMode | None = None


def shared(node: Node, cut: Cut, proposed: Mapping[Node, Cut]) -> Shared:
    """Returns how ranks compute their shares of a node with this cut; `proposed` says what else may
    be shared out. Raises CutUnknown if they cannot.
    """
    if is_attention(node.target):
        return _attended(node, cut, proposed)
    if node.target is WHOLE:
        if not whole_cut(bound(node)).is_like(cut):
            raise CutUnknown(f"{node.name} comes in other shares than its reader needs")
        return Shared(cut)
    wanted = wanted_cuts(node, cut)
    if not wanted and node.target is aten.expand.default:
        return Shared(cut)
    slicing = slicing_of(node)
    cuts = wanted
    if slicing is not None and slicing is not node:
        cuts = {slicing: next(iter(wanted.values()))}
    if not cuts:
        raise CutUnknown(f"{node.name} reads nothing that could be shared out")
    step = step_cut(node, cuts)
    if not step.cut.is_like(cut):
        raise CutUnknown(f"{node.name} would be shared out at other places than its reader")
    for item in step.by_chunk:
        if item not in cuts and (own := cut_of_operand(node, item, step.cut)):
            wanted[item] = own
    return Shared(cut, wanted)


def _attended(node: Node, cut: Cut, proposed: Mapping[Node, Cut]) -> Shared:
    attention = parse_repeatable(node)
    op = attention.op
    refuse_other_operands(node, attention)
    if cut.dim == 0 and op.layout.startswith("B"):
        roles = (attention.query, attention.key, attention.value)
        if not all(same(shape_of(item)[0], shape_of(attention.query)[0]) for item in roles):
            raise CutUnknown(f"{node.name} repeats samples")
        return Shared(cut, dict.fromkeys(roles, cut), AttentionMode.BATCH)
    if cut.dim != op.token_dim or not same(cut.outer, 1):
        raise CutUnknown(f"{node.name} is cut at dim {cut.dim}, where its tokens are not")
    keys = _keys_to_exchange(attention, proposed)
    if keys is not None and _goes_by_heads(attention, cut, keys):
        needs = {attention.key: keys, attention.value: keys, attention.query: cut}
        if attention.query not in (attention.key, attention.value):
            return Shared(cut, needs, AttentionMode.ULYSSES)
    if not op.has_independent_queries or attention.placed_by:
        raise CutUnknown(f"{node.name} looks at the places of its rows")
    if attention.query in (attention.key, attention.value):
        raise CutUnknown(f"{node.name} reads its query as a whole too")
    return Shared(cut, {attention.query: cut}, AttentionMode.CROSS)


def _keys_to_exchange(attention: FusedAttention, proposed: Mapping[Node, Cut]) -> Cut | None:
    """Returns how keys and values are shared out, None if they are not, or not alike."""
    keys, values = proposed.get(attention.key), proposed.get(attention.value)
    if keys is None or values is None or not keys.is_like(values):
        return None
    return keys if keys.dim == attention.op.token_dim and same(keys.outer, 1) else None


def _goes_by_heads(attention: FusedAttention, queries: Cut, keys: Cut) -> bool:
    """Returns whether every rank can compute some heads with all tokens, in the order in which
    exchanges deliver them.
    """
    op, num_ranks = attention.op, queries.count
    roles = (attention.query, attention.key, attention.value)
    if not (op.has_independent_heads and all(is_carried(value_of(item).dtype) for item in roles)):
        return False
    heads, key_heads = (
        static_size(shape_of(item)[op.head_dim]) for item in (attention.query, attention.key)
    )
    if heads is None or key_heads is None:
        return False
    if heads < num_ranks or (key_heads != heads and (heads % num_ranks or key_heads % num_ranks)):
        return False
    in_order = all(
        len(cut.segments) == 1 and divides(num_ranks, cut.segments[0]) for cut in (queries, keys)
    )
    return in_order or (op.has_independent_queries and not attention.placed_by)
