# SPDX-License-Identifier: Apache-2.0
"""Builds a `UlyssesSite` from one attention and the exchanges around it, or gives the reason
against it.

Checks come first and raise `Refused`; the record is built last, from values that have passed them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from torch.fx import Node

from cocodiff_compile.ir import layout
from cocodiff_compile.ir.aten import shape_of, size_bytes
from cocodiff_compile.ir.collectives import AllToAll
from cocodiff_compile.ir.layout import (
    BROADCAST,
    RANK,
    Dims,
    Factor,
    LayoutUnknown,
    Size,
    static_size,
)
from cocodiff_compile.ir.module_path import module_path_of
from cocodiff_compile.ir.parts import is_padding
from cocodiff_compile.ir.records import Attention, Declined, Exchange, Leg, Role, UlyssesSite
from cocodiff_compile.recognize.attention_cores import AttentionCore, Operand
from cocodiff_compile.recognize.exchanges import (
    Exchanges,
    Surroundings,
    before_views,
    view_path,
    views_after,
)
from cocodiff_compile.recognize.projections import projections_after, projections_before
from cocodiff_compile.recognize.refusals import ROLE_NAMES, Refused, common_ranks, refuse_missing
from cocodiff_compile.recognize.walk import Reached, Traced, trace, trace_root, walk_forward


def match_site(
    core: AttentionCore, around: Surroundings, exchanges: Exchanges, index: int
) -> UlyssesSite | Declined:
    """Returns the site around an attention that at least one exchange touches, or a decline."""
    try:
        return _site(core, around, exchanges, index)
    except Refused as refused:
        return Declined(refused.node, str(refused), module_path_of(core.nodes))


def _site(
    core: AttentionCore, around: Surroundings, exchanges: Exchanges, index: int
) -> UlyssesSite:
    refuse_missing(core, around)
    ranks = common_ranks(around.all_to_alls(exchanges))
    q, k, v = (
        _leg_in(role, operand, around.input_routes[role][0], exchanges, ranks)
        for role, operand in core.operands.items()
    )
    o = _leg_out(core, around.output_routes[0], exchanges, ranks, q)
    for leg in (q, k, v):
        _refuse_other_readers(leg, core)
    nodes = [item.node for leg in (q, k, v) for item in leg.projections]
    return UlyssesSite(
        index=index,
        module_path=module_path_of(nodes or core.nodes),
        attention=Attention(core.form, core.nodes, core.output, core.mask, core.is_causal),
        q=q,
        k=k,
        v=v,
        o=o,
        independent=(),
    )


def _leg_in(
    role: Role, operand: Operand, route: Reached, exchanges: Exchanges, ranks: tuple[int, ...]
) -> Leg:
    all_to_all = exchanges.by_wait[route.barrier]
    source = before_views(all_to_all.source)
    packed = trace_root(view_path(source, all_to_all.source))
    scattered, received = _exchange(all_to_all, packed, len(ranks))
    operand, unpacked = _with_samples_apart(operand, trace(received, route.path))
    gather_dim = _gather_dim(all_to_all, unpacked.dims, "tokens")
    _refuse_other_than_heads_in(all_to_all, operand, unpacked, gather_dim, scattered)
    heads_per_rank, samples = _heads_and_samples(operand, unpacked, gather_dim, scattered)
    tokens = unpacked.whole(gather_dim)
    # What is dropped of the tokens is padding, not another role's part.
    cuts = [cut for cut in unpacked.cuts if cut.root_dim not in _sources(tokens)]
    result, result_dims = _before_dropping(unpacked, gather_dim)
    gathered = _gather_dim(all_to_all, result_dims, "tokens")
    exchange = _record(all_to_all, "in", source, result, ranks, (scattered.source, gathered))
    return Leg(
        role=role,
        exchange=replace(exchange, token_rows=_token_rows(received, tokens[1:])),
        projections=projections_before(source, cuts[-1] if cuts else None, samples),
        num_heads=heads_per_rank * len(ranks),
        head_size=operand.head_size,
        tokens_per_rank=layout.product(tokens[1:]),
    )


def _with_samples_apart(operand: Operand, unpacked: Traced) -> tuple[Operand, Traced]:
    """Returns an operand [S, H, D] in which the tokens of several samples follow each other as if
    the samples had a dim of their own; others as they are.
    """
    first = unpacked.dims[0]
    place = next((index for index, factor in enumerate(first) if factor.source == RANK), 0)
    if operand.token_dim != 0 or unpacked.node is not operand.node or not place:
        return operand, unpacked
    dims = (first[:place], first[place:], *unpacked.dims[1:])
    shifted = replace(
        operand,
        head_dim=operand.head_dim + 1,
        token_dim=operand.token_dim + 1,
        size_dim=operand.size_dim + 1,
    )
    return shifted, replace(unpacked, dims=dims)


def _token_rows(received: Dims, tokens: tuple[Factor, ...]) -> tuple[int, int] | None:
    """Returns where the tokens of one rank are in its message, as (blocks before, tokens)."""
    factors = [factor for dim in received for factor in dim][1:]
    count = len(tokens)
    for first in range(len(factors) - count + 1):
        if not count or factors[first : first + count] != list(tokens):
            continue
        before, size = (static_size(layout.product(f)) for f in (factors[:first], tokens))
        return None if before is None or size is None else (before, size)
    return None


def _before_dropping(unpacked: Traced, gather_dim: int) -> tuple[Node, Dims]:
    """Returns the last tensor with all that was received, before padded rows are dropped."""
    for step in unpacked.narrowed_in(gather_dim):
        return step.node, step.dims
    return unpacked.node, unpacked.dims


def _leg_out(
    core: AttentionCore, route: Reached, exchanges: Exchanges, ranks: tuple[int, ...], query: Leg
) -> Leg:
    all_to_all = exchanges.by_start[route.barrier]
    packed = trace_root(route.path[:-1])
    if packed.stopped_by:
        raise Refused(
            packed.node, f"between attention and the exchange of its result: {packed.stopped_by}"
        )
    scattered, received = _exchange(all_to_all, packed, len(ranks))
    unpacked = trace(received, views_after(all_to_all.wait))
    gather_dim = _gather_dim(all_to_all, unpacked.dims, "heads")
    if scattered.source != core.o.token_dim:
        raise Refused(
            all_to_all.start,
            f"the output exchange scatters dim {scattered.source} of the result, "
            f"its tokens are dim {core.o.token_dim}",
        )
    _refuse_other_than_heads(all_to_all, core, unpacked.dims, gather_dim, query)
    samples = _samples_among_tokens(core.o, query.tokens_per_rank * len(ranks))
    _refuse_round_robin(all_to_all, packed.dims, scattered, "tokens", samples)
    source, scatter_dim = _after_padding(all_to_all, route.path[:-1], scattered)
    return Leg(
        role="o",
        exchange=_record(
            all_to_all, "out", source, unpacked.node, ranks, (scatter_dim, gather_dim)
        ),
        projections=projections_after(all_to_all.wait),
        num_heads=query.num_heads,
        head_size=core.o.head_size,
        tokens_per_rank=layout.product(
            [
                factor
                for dim in received
                for factor in dim
                if factor.source == scattered.source
                and not _larger(factor.stride, scattered.stride)
            ]
        ),
    )


def _after_padding(
    all_to_all: AllToAll, path: tuple[Node, ...], scattered: Factor
) -> tuple[Node, int]:
    """Returns the first tensor before the output exchange with everything that is sent, and its
    scattered dim: the attention's result, unless dropped rows are inserted into it again.
    """
    last = max((index for index, node in enumerate(path) if is_padding(node)), default=0)
    if last > 0:
        scattered, _ = _exchange(all_to_all, trace_root(path[last:]), all_to_all.num_ranks)
    return path[last], scattered.source


def _refuse_other_than_heads(
    all_to_all: AllToAll, core: AttentionCore, dims: Dims, gather_dim: int, query: Leg
) -> None:
    """Raises Refused unless the sending rank stands right before the heads it held, or before the
    elements of a head, or alone in a dim, if it held a single one.
    """
    behind = [factor for dim in dims[gather_dim:] for factor in dim][1:]
    source = behind[0].source if behind else None
    one_head = layout.same(query.num_heads, all_to_all.num_ranks)
    alone = layout.same(shape_of(core.o.node)[core.o.head_dim], 1) and len(dims[gather_dim]) == 1
    if source != core.o.head_dim and not (source == core.o.size_dim and one_head) and not alone:
        raise Refused(
            all_to_all.wait,
            "the output exchange gathers something else than heads: the sending rank does not "
            f"stand right before whole heads in {_describe(dims)}",
        )
    if not layout.same(behind[0].stride, 1):
        raise Refused(
            all_to_all.wait,
            "the output exchange gathers samples, not heads: rank before sample in "
            f"{_describe(dims)}",
        )


def _record(
    all_to_all: AllToAll,
    direction: Literal["in", "out"],
    source: Node,
    result: Node,
    ranks: tuple[int, ...],
    dims: tuple[int, int],
) -> Exchange:
    return Exchange(
        start=all_to_all.start,
        wait=all_to_all.wait,
        source=source,
        result=result,
        direction=direction,
        group=all_to_all.group,
        ranks=ranks,
        splits=all_to_all.input_splits,
        scatter_dim=dims[0],
        gather_dim=dims[1],
        size_bytes=size_bytes(all_to_all.source),
    )


def _exchange(all_to_all: AllToAll, packed: Traced, num_ranks: int) -> tuple[Factor, Dims]:
    try:
        return layout.exchange(packed.dims, num_ranks)
    except LayoutUnknown as unknown:
        raise Refused(
            all_to_all.start,
            f"what goes to which of the {num_ranks} ranks is unclear: {unknown}; pad heads and "
            "tokens so that they divide by the number of ranks",
        ) from None


def _gather_dim(all_to_all: AllToAll, dims: Dims, what: str) -> int:
    """Returns the dim that holds the sending rank, which must be its outer part."""
    dim = layout.dim_of(dims, RANK)
    if dim is None or dims[dim][0].source != RANK:
        raise Refused(
            all_to_all.wait,
            f"received {what} are interleaved over the ranks: the sending rank is not the "
            f"outermost part of a dim in {_describe(dims)}",
        )
    return dim


def _refuse_other_than_heads_in(
    all_to_all: AllToAll, operand: Operand, unpacked: Traced, gather_dim: int, scattered: Factor
) -> None:
    dims = unpacked.dims
    reaches_attention = unpacked.node is operand.node
    if reaches_attention and gather_dim != operand.token_dim:
        raise Refused(
            all_to_all.wait,
            f"the exchange gathers dim {gather_dim} of the attention's operand, "
            f"its tokens are dim {operand.token_dim}",
        )
    tokens = _sources(unpacked.whole(gather_dim))
    other = scattered.source in tokens
    if reaches_attention:
        other = other or not _scatters_heads(operand, dims, tokens, scattered)
    if other:
        raise Refused(
            all_to_all.start,
            f"the exchange scatters dim {scattered.source} of its source, which holds tokens, "
            "samples or parts of heads, not heads",
        )
    _refuse_round_robin(all_to_all, dims, scattered, "heads")


def _sources(factors: tuple[Factor, ...]) -> set[int]:
    return {factor.source for factor in factors}


def _scatters_heads(operand: Operand, dims: Dims, tokens: set[int], scattered: Factor) -> bool:
    """Returns whether the heads, rather than samples or sizes, were scattered.

    The blocks that go to one rank each may be a dim of their own, right before that of its heads.
    """
    # What shares its source with the tokens are samples: rows of a GEMM are samples x tokens.
    heads = _sources(dims[operand.head_dim]) - tokens - {BROADCAST}
    if operand.head_dim > 0 and scattered.source in _sources(dims[0]):
        return False
    if any(source > scattered.source + 1 for source in heads):
        return False
    in_sizes = scattered.source in _sources(dims[operand.size_dim])
    return not in_sizes or not heads or scattered.source in heads


def _samples_among_tokens(result: Operand, tokens: Size) -> Size:
    """Returns how many samples follow each other among the tokens of a result [S, H, D]; 1 where
    samples have a dim of their own.
    """
    return 1 if result.token_dim > 0 else shape_of(result.node)[0] // tokens


def _refuse_round_robin(
    all_to_all: AllToAll, dims: Dims, scattered: Factor, what: str, samples: Size = 1
) -> None:
    """Raises Refused if anything but whole `samples` lies outside of what is scattered."""
    whole = scattered.stride * all_to_all.num_ranks
    for factor in (factor for dim in dims for factor in dim):
        is_sample = layout.same(factor.size, samples) and layout.same(factor.stride, whole)
        is_outside = factor.source == scattered.source and _larger(factor.stride, scattered.stride)
        if is_outside and not is_sample:
            raise Refused(
                all_to_all.start,
                f"{what} are dealt round-robin, one block of {scattered.stride} per rank and turn; "
                "give each rank one consecutive block",
            )


def _larger(left: Size, right: Size) -> bool:
    return layout.divides(right, left) and not layout.same(left, right)


def _heads_and_samples(
    operand: Operand, unpacked: Traced, gather_dim: int, scattered: Factor
) -> tuple[Size, Size]:
    """Returns the heads that a rank holds after the exchange, without repeats for grouped queries,
    and the samples.

    Heads and their elements come from the scattered dim and those after it, in whatever dims of the
    operand they are; the rest, except for the tokens, are samples.
    """
    tokens = _sources(unpacked.whole(gather_dim))
    others = [
        factor
        for dim, factors in enumerate(unpacked.dims)
        for factor in factors
        if dim != gather_dim and factor.source != BROADCAST
    ]
    of_heads = _head_sources(operand, unpacked, _sources(tuple(others)) - tokens, scattered)
    _refuse_samples_among_heads(unpacked, of_heads, tokens, scattered)
    elements = layout.product([factor for factor in others if factor.source in of_heads])
    samples = layout.product([factor for factor in others if factor.source not in of_heads])
    head_size = operand.head_size
    if not layout.divides(head_size, elements) or not _has_heads_of(head_size, unpacked):
        raise Refused(
            unpacked.node,
            f"a token has {elements} elements per rank after the exchange, the attention reads "
            f"heads of {head_size}: they are no whole number of those, or were padded or cut",
        )
    return elements // head_size, samples


def _head_sources(
    operand: Operand, unpacked: Traced, sources: set[int], scattered: Factor
) -> set[int]:
    of_heads = {source for source in sources if source >= scattered.source}
    if unpacked.node is operand.node and operand.head_dim > 0:
        of_heads -= _sources(unpacked.dims[0])  # samples, also where the root has its heads first
    return of_heads


def _refuse_samples_among_heads(
    unpacked: Traced, of_heads: set[int], tokens: set[int], scattered: Factor
) -> None:
    before_tokens = {s for s in of_heads if any(0 < s < token for token in tokens)}
    if scattered.source == 0 and before_tokens:
        raise Refused(
            unpacked.node,
            f"the exchange scatters its source's first dim, and whether dims {before_tokens} hold "
            "samples or heads is unclear; pad heads before they are made the first dim",
        )


def _has_heads_of(head_size: Size, unpacked: Traced) -> bool:
    """Returns whether some neighbouring dims together hold one head."""
    sizes = [layout.product(factors) for factors in unpacked.dims]
    return any(
        layout.same(math.prod(sizes[first:last]), head_size)
        for first in range(len(sizes))
        for last in range(first + 1, len(sizes) + 1)
    )


def _refuse_other_readers(leg: Leg, core: AttentionCore) -> None:
    for route in walk_forward(leg.exchange.wait):
        if route.barrier not in core.nodes:
            raise Refused(
                leg.exchange.wait,
                f"the exchanged {ROLE_NAMES[leg.role]} also feeds {route.barrier.name} "
                f"({route.barrier.target}), not this attention alone",
            )


def _describe(dims: Dims) -> str:
    def name(factor: Factor) -> str:
        return f"rank {factor.size}" if factor.source == RANK else str(factor.size)

    return "[" + ", ".join("x".join(map(name, dim)) or "1" for dim in dims) + "]"
