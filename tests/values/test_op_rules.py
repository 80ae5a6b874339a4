# SPDX-License-Identifier: Apache-2.0
"""The rules by which cuts pass an op: cutting before it equals cutting behind it, bit for bit, or
the rule refuses.

Each op of the table is called with random shapes, dims and data, its operands are cut at random
places, and what the rewriter emits for the chunks is joined and compared with the op on the whole.
Cuts are drawn like those of heads, in equal chunks, and like those of rows, in chunks of any
lengths; or each rank computes its share of the result, of one or more segments, and the shares are
gathered. What is drawn and compared knows nothing of how cuts are followed; `_chunked` and
`_like_shares` do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from cocodiff_compile.cut.checked_steps import step_equal_chunks, step_heads, step_tokens
from cocodiff_compile.cut.cut import Cut, CutUnknown, Step
from cocodiff_compile.cut.emit_chunks import EmitChunks
from cocodiff_compile.cut.joining import is_dense
from cocodiff_compile.cut.rules import CUT_RULES, step_cut
from cocodiff_compile.ir.aten import (
    QUANTISED_MATMUL,
    SLICING,
    aten,
    attention_operands,
    emit,
    value_of,
)
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.pointwise import POINTWISE
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.shard.emit_shares import EmitShares
from cocodiff_compile.shard.shares import shared
from cocodiff_compile.shard.wanted_cuts import WANTED, slicing_of
from tests.support.op_calls import (
    ATTENTIONS,
    CALLS,
    FAMILIES,
    NUM_RANKS,
    WITHOUT_A_CALL,
    Draw,
    OpCall,
    is_exact,
)

Inside = Mapping[Node, Cut]
"""The inputs that are cut, with their cuts."""


def test_every_op_of_the_table_is_called_here() -> None:
    assert set(CALLS) | WITHOUT_A_CALL == {*CUT_RULES, *ATTENTIONS}


class _Built:
    """A graph of one call, and the values of its inputs."""

    def __init__(self, call: OpCall) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.inputs: dict[Node, Tensor] = {}
        self.rank: Node | None = None
        """Where ranks compute shares: the input that holds the number of a rank."""
        args, kwargs = torch.utils._pytree.tree_map_only(
            Tensor, self._input, (call.args, call.kwargs)
        )
        like = next(iter(self.inputs))
        self.nodes = [emit(self.graph, call.op, *args, like=like, **kwargs)]
        if call.result is not None:
            getitem = emit(self.graph, operator.getitem, self.nodes[0], call.result, like=like)
            self.nodes.append(getitem)

    def _input(self, value: Tensor) -> Node:
        for node, known in self.inputs.items():
            if known is value:
                return node
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        self.inputs[node] = value
        return node

    def compare(self, joined: Node) -> None:
        """The joined parts are the whole, on every rank, and lie in memory as it does."""
        whole = self.nodes[-1]
        is_bitwise = is_exact(self.nodes[0].target) and self.rank is None
        near = 0.0 if is_bitwise else 1e-5
        self.graph.output((whole, joined))
        ranks = [
            [self._value(node, rank) for node in self.graph.find_nodes(op="placeholder")]
            for rank in range(NUM_RANKS)
        ]
        for expected, found in run_lockstep(self.graph, ranks, {"group": lambda _: (0, 1)}):
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=near, atol=near, equal_nan=True)
        if is_dense(whole) and self.rank is None:
            shown = [value_of(node) for node in (whole, joined)]
            dims = [dim for dim, size in enumerate(shown[0].shape) if size > 1]
            assert len({tuple(value.stride(dim) for dim in dims) for value in shown}) == 1

    def _value(self, node: Node, rank: int) -> Tensor:
        if node is self.rank:
            return torch.tensor([rank])
        return self.inputs[node] if self.rank else _of_rank(self.inputs[node], rank)

    def add_rank(self) -> Node:
        with self.graph.inserting_before(self.nodes[0]):
            self.rank = self.graph.placeholder("rank")
        with self.mode:
            self.rank.meta["val"] = torch.zeros(1, dtype=torch.int64)
        return self.rank


def _of_rank(value: Tensor, rank: int) -> Tensor:
    """Other data on every rank, in the same order in memory."""
    if rank == 0 or not value.is_floating_point():
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    own = value.new_zeros(extent).as_strided(value.shape, value.stride())
    wide = value.float() if value.element_size() == 1 else value  # 8 bits cannot be added to
    return own.copy_(wide + rank)


def _chunked(built: _Built, inside: Inside, keeps_ops: bool) -> Node:
    """Computes a call chunk by chunk and joins the chunks of its result."""
    steps = {node: Step(cut, ()) for node, cut in inside.items()}
    for node in built.nodes:
        reads = {source: steps[source].cut for source in node.all_input_nodes if source in steps}
        steps[node] = (step_equal_chunks if keeps_ops else step_cut)(node, reads)
    chunks = EmitChunks(built.graph, steps, keeps_ops)
    numbers = range(next(iter(inside.values())).count)
    for node, cut in inside.items():
        chunks.chunks[node] = [
            chunks.part(node, cut, number) if cut.lengths[number] else None for number in numbers
        ]
    for node in built.nodes:
        for number in numbers:
            chunks.emit(node, number)
    return chunks.whole(built.nodes[-1])


def _like_heads(built: _Built, draw: Draw) -> Node:
    count = draw(st.sampled_from((2, 3)))

    def possible(node: Node) -> list[Cut]:
        return [
            Cut.in_equal_chunks(dim, outer, size, count)
            for dim, size in enumerate(value_of(node).shape)
            for outer in range(1, size + 1)
            if size % (outer * count) == 0
        ]

    return _chunked(built, _cut_some(built, possible, draw), keeps_ops=True)


def _like_rows(built: _Built, draw: Draw) -> Node:
    shares = draw(st.lists(st.integers(0, 3), min_size=2, max_size=3))

    def possible(node: Node) -> list[Cut]:
        return [
            Cut(dim, outer, lengths)
            for dim, size in enumerate(value_of(node).shape)
            for outer in range(1, size + 1)
            if size % outer == 0 and (lengths := _lengths(size // outer, shares))
        ]

    return _chunked(built, _cut_some(built, possible, draw), keeps_ops=False)


def _lengths(rows: int, shares: list[int]) -> tuple[int, ...]:
    """Chunks of about these shares, empty if there are not two rows or two chunks."""
    total = sum(shares)
    if rows < 2 or sum(share > 0 for share in shares) < 2:
        return ()
    ends = [rows * sum(shares[: n + 1]) // total for n in range(len(shares))]
    lengths = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
    return lengths if max(lengths) < rows else ()


def _cut_some(built: _Built, possible: Callable[[Node], list[Cut]], draw: Draw) -> Inside:
    """Some inputs cut: the others as the first one, at random, or not at all."""
    inputs = [node for node in built.inputs if possible(node)]
    if not inputs:
        raise CutUnknown("nothing is large enough to be cut")
    first = draw(st.sampled_from(inputs))
    inside = {first: draw(st.sampled_from(possible(first)))}
    rank = value_of(first).dim()
    for node in inputs:
        way = draw(st.sampled_from(("aligned", "aligned", "random", "whole")))
        if node is first or way == "whole":
            continue
        cuts = possible(node)
        if way == "aligned":
            cut = inside[first]
            dim = cut.dim + value_of(node).dim() - rank
            cuts = [item for item in cuts if item == cut.at(dim)]
        if cuts:
            inside[node] = draw(st.sampled_from(cuts))
    return inside


def _like_shares(built: _Built, draw: Draw) -> Node:
    """Every rank computes its share of the result, and gathers those of the others."""
    first, last = built.nodes[0], built.nodes[-1]
    cut = _share(last, draw)
    proposed: dict[Node, Cut] = {}
    if is_attention(first.target) and draw(st.booleans()):
        _, key, value = attention_operands(first)
        keys = _share(key, draw)
        proposed = {key: keys, value: keys}
    nodes = [last] if slicing_of(last) is not None else built.nodes
    steps = {node: shared(node, cut, proposed) for node in nodes}
    shares = EmitShares(built.graph, "group", built.add_rank(), steps)
    for node in nodes:
        shares.emit(node)
    return shares.whole(last)


def _share(node: Node, draw: Draw) -> Cut:
    possible = [
        (dim, outer, size // outer)
        for dim, size in enumerate(value_of(node).shape)
        for outer in range(1, size + 1)
        if size % outer == 0 and size // outer > 1
    ]
    if not possible:
        raise CutUnknown("nothing is large enough to be shared out")
    dim, outer, inner = draw(st.sampled_from(possible))
    segments = [inner]
    while segments[-1] > 1 and draw(st.booleans()):
        length = draw(st.integers(1, segments[-1] - 1))
        segments[-1:] = [length, segments[-1] - length]
    return Cut.over_ranks(dim, outer, segments, NUM_RANKS)


CUTTERS = {"heads": _like_heads, "rows": _like_rows, "shares": _like_shares}


def _hold(ops: Collection[Any], what: str, examples: int) -> None:
    """Tries ops with random calls and cuts; some must be accepted, or the rule says nothing."""
    accepted = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def cut_before_is_cut_behind(data: Any) -> None:
        op = data.draw(st.sampled_from(sorted(ops, key=str)))
        built = _Built(CALLS[op](op, data.draw))
        try:
            joined = CUTTERS[what](built, data.draw)
        except CutUnknown:
            return
        built.compare(joined)
        accepted.append(op)

    cut_before_is_cut_behind()
    assert accepted, f"the rules for {what} refused all of {examples} calls"


REFUSED_FOR_HEADS = {aten.mm.default, aten.addmm.default, *QUANTISED_MATMUL}
"""Fewer rows may give other bits: heads are not read as rows."""
RULED = {*CUT_RULES, *ATTENTIONS}
RULES = {
    "heads": RULED - REFUSED_FOR_HEADS,
    "rows": RULED,
    "shares": RULED & {*WANTED, *SLICING, *ATTENTIONS},
}
OP_CASES = [
    pytest.param(op, what, id=f"{what}-{op}")
    for what, ruled in RULES.items()
    for op in sorted(ruled & CALLS.keys(), key=str)
]


@pytest.mark.parametrize(
    ("family", "what"),
    [
        pytest.param(family, what, id=f"{family}-{what}")
        for what in ("heads", "rows")  # shares: op by op, below
        for family, ops in FAMILIES.items()
        if ops & RULES[what]
    ],
)
def test_cutting_before_an_op_is_cutting_behind_it(family: str, what: str) -> None:
    _hold(FAMILIES[family] & RULES[what], what, 80)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "what"), OP_CASES)
def test_cutting_before_each_op_is_cutting_behind_it(op: Any, what: str) -> None:
    _hold({op}, what, 40 if op in POINTWISE else 400)


def _built(op: Any, *args: Any, **kwargs: Any) -> _Built:
    return _Built(OpCall(op, args, kwargs))


def test_blocks_that_count_as_channels_last_are_joined_as_the_whole_lies() -> None:
    built = _built(aten.neg.default, torch.randn(1, 2, 4).transpose(1, 2))
    (x,) = built.inputs
    built.compare(_chunked(built, {x: Cut(1, 2, (1, 1))}, keeps_ops=True))


SUM_CUT = Cut(2, 2, (1, 2))


@pytest.mark.parametrize("op", [aten.mean.dim, aten.sum.dim_IntList])
def test_a_sum_of_copied_blocks_keeps_the_order_of_its_terms(op: Any) -> None:
    built = _built(op, torch.randn(1, 6, 48).transpose(1, 2), [1])
    (x,) = built.inputs
    built.compare(_chunked(built, {x: SUM_CUT}, keeps_ops=False))


def test_a_sum_with_gaps_between_its_terms_is_not_cut_in_blocks() -> None:
    built = _built(aten.sum.dim_IntList, torch.randn(1, 6, 96)[..., ::2].transpose(1, 2), [1])
    (x,) = built.inputs
    with pytest.raises(CutUnknown, match="with gaps"):
        _chunked(built, {x: SUM_CUT}, keeps_ops=False)


@pytest.mark.parametrize("op", [aten.mean.dim, aten.sum.dim_IntList])
def test_sums_of_columns_are_not_cut(op: Any) -> None:
    """Kernels choose how many columns to sum at a time, and in which order, by their number."""
    x, cut = torch.randn(2, 48, 4, 8), Cut(2, 1, (2, 2))
    built = _built(op, x, [1], True)
    (node,) = built.inputs
    for step in (step_heads, step_cut):
        with pytest.raises(CutUnknown, match="order"):
            step(built.nodes[0], {node: cut})
    rows_outside = _built(op, x, [3], True)
    (node,) = rows_outside.inputs
    assert step_heads(rows_outside.nodes[0], {node: cut}) == Step(cut, (node,))


def test_a_broadcast_matrix_holds_no_batch() -> None:
    built = _built(
        aten.baddbmm.default, torch.randn(4, 6), torch.randn(4, 4, 2), torch.randn(4, 2, 6)
    )
    with pytest.raises(
        CutUnknown, match=r"is cut at dim 0 of .* its batch or its heads are not in it"
    ):
        step_cut(built.nodes[0], dict.fromkeys(built.inputs, Cut(0, 1, (2, 2))))


@pytest.mark.parametrize("op", [aten.mm.default, aten.bmm.default], ids=str)
def test_a_product_is_not_cut_along_what_it_sums_over(op: Any) -> None:
    batch = (3,) if op is aten.bmm.default else ()
    built = _built(op, torch.randn(*batch, 4, 6), torch.randn(*batch, 6, 8))
    left, right = built.inputs
    cut = Cut(len(batch) + 1, 1, (2, 4))
    for cuts in ({left: cut}, {right: cut.at(len(batch))}, {left: cut, right: cut.at(len(batch))}):
        with pytest.raises(CutUnknown):
            step_cut(built.nodes[0], cuts)


def test_a_causal_attention_is_not_cut_by_rows() -> None:
    """The keys that a query sees depend on its place among all queries."""
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    cut = Cut(2, 1, (2, 2))
    for is_causal in (False, True):
        built = _built(op, q, k, v, 0.0, is_causal)
        query = next(iter(built.inputs))
        if not is_causal:
            assert step_cut(built.nodes[0], {query: cut}) == Step(cut, (query,))
            continue
        with pytest.raises(CutUnknown, match="causal"):
            step_cut(built.nodes[0], {query: cut})


def test_which_operands_are_read_by_chunk_depends_on_the_dim() -> None:
    q, k, v = (torch.randn(1, 4, 4, 8) for _ in range(3))
    attention = _built(aten.scaled_dot_product_attention.default, q, k, v)
    product = _built(aten.bmm.default, torch.randn(4, 4, 2), torch.randn(4, 2, 6))
    for built, dim, count in (
        (attention, 1, 3),
        (attention, 2, 1),
        (product, 0, 2),
        (product, 1, 1),
    ):
        (node,), operands = built.nodes, list(built.inputs)
        cuts = {operands[0]: Cut(dim, 1, (2, 2))}
        assert step_cut(node, cuts).by_chunk == tuple(operands[:count])
        with pytest.raises(CutUnknown, match=r"heads as rows|rows of all"):
            step_heads(node, cuts) if count == 1 else step_tokens(node, cuts, frozenset())


def test_heads_stay_all_of_them() -> None:
    """A part of the heads, or heads beside others, may still be equal chunks."""
    x, other, cut = torch.randn(8, 3), torch.randn(2, 3), Cut(0, 1, (4, 4))
    for built in (
        _built(aten.slice.Tensor, x, 0, 1, 7),
        _built(aten.cat.default, [other, x, other]),
    ):
        (node,), reads = built.nodes, {n: cut for n, value in built.inputs.items() if value is x}
        assert step_cut(node, reads).cut.is_equal
        with pytest.raises(CutUnknown, match="takes some heads, or joins something to them"):
            step_heads(node, reads)


def test_a_slice_may_end_inside_a_chunk() -> None:
    built = _built(aten.slice.Tensor, torch.randn(8, 3), 0, 1, 6)
    (node,) = built.inputs
    cut = Cut(0, 1, (4, 4))
    assert step_cut(built.nodes[0], {node: cut}).cut == Cut(0, 1, (3, 2))
    built.compare(_chunked(built, {node: cut}, keeps_ops=False))


def test_an_op_that_is_not_in_the_table_is_refused() -> None:
    for op in (aten.cumsum.default, aten.flip.default, aten.equal.default, aten.rrelu.default):
        assert op not in CUT_RULES
    built = _built(aten.cumsum.default, torch.randn(2, 4), 1)
    (node,) = built.inputs
    with pytest.raises(CutUnknown, match="may mix chunks"):
        step_cut(built.nodes[0], {node: Cut(0, 1, (1, 1))})


def test_rows_are_written_at_their_own_places() -> None:
    built = _built(aten.slice_scatter.default, torch.randn(8, 3), torch.randn(4, 3), 0, 2, 6)
    (node,), (whole, rows) = built.nodes, built.inputs
    cut = Cut.over_ranks(0, 1, (2, 4, 2), NUM_RANKS)
    reads = {whole: cut, rows: cut.with_segments((4,))}
    assert step_cut(node, reads) == Step(cut, (whole, rows))
    for other in (cut.with_segments((1, 3)), cut.with_segments((2, 2))):
        with pytest.raises(CutUnknown, match="at other places"):
            step_cut(node, {whole: cut, rows: other})
    with pytest.raises(CutUnknown, match="begins or ends inside"):
        step_cut(node, {whole: cut.with_segments((8,)), rows: cut.with_segments((4,))})


def test_shares_lie_where_their_reader_wants_them() -> None:
    """A result of two segments is no share of one segment, though all shares are as long."""
    built = _built(aten.cat.default, [torch.randn(4, 3), torch.randn(4, 3)])
    (node,) = built.nodes
    wanted = Cut.over_ranks(0, 1, (4, 4), NUM_RANKS)
    assert shared(node, wanted, {}).cut == wanted
    with pytest.raises(CutUnknown, match="at other places than its reader"):
        shared(node, wanted.with_segments((8,)), {})
