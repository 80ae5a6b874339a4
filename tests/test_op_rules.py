"""The rules by which cuts pass an op: cutting before it equals cutting behind it, bit for bit, or
the rule refuses.

Each op of the tables is called with random shapes, dims and data, its operands are cut at random
places, and what the rewriter emits for the parts is joined and compared with the op on the whole.
What is drawn and compared knows nothing of how cuts are followed; `_in_heads` and `_in_rows` do.
"""

from __future__ import annotations

import dataclasses
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

from cocodiff_compile.cut.head_chunks import HeadChunks, common_cut, cuts_outside
from cocodiff_compile.cut.head_cut import HEAD_RULES, CutUnknown, HeadCut
from cocodiff_compile.cut.joining import is_dense
from cocodiff_compile.cut.row_cut import (
    ONE_OPERAND_RULES,
    ROW_RULES,
    RowCut,
    RowPlan,
    RowStep,
    step_rows,
)
from cocodiff_compile.cut.row_runs import RowRuns
from cocodiff_compile.ir.aten import ALL_TO_ALL, aten, emit, value_of
from cocodiff_compile.ir.layout import divides
from cocodiff_compile.ir.pointwise import POINTWISE
from tests.lockstep import run_lockstep
from tests.op_calls import (
    CALLS,
    FAMILIES,
    NUM_RANKS,
    WITHOUT_A_CALL,
    Draw,
    OpCall,
    is_exact,
)

Inside = Mapping[Node, Any]
"""The inputs that are cut, with their cuts."""

TABLED = {*HEAD_RULES, *ROW_RULES, *ONE_OPERAND_RULES}


def test_every_op_of_the_tables_is_called_here() -> None:
    assert set(CALLS) | WITHOUT_A_CALL >= TABLED
    assert set(CALLS) - {torch.ops._c10d_functional.all_to_all_single.default} <= TABLED


class _Built:
    """A graph of one call, and the values of its inputs."""

    def __init__(self, call: OpCall) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.inputs: dict[Node, Tensor] = {}
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
        near = 0.0 if is_exact(self.nodes[0].target) else 1e-5
        self.graph.output((whole, joined))
        ranks = [[_of_rank(x, rank) for x in self.inputs.values()] for rank in range(NUM_RANKS)]
        for expected, found in run_lockstep(self.graph, ranks, {"group": lambda _: (0, 1)}):
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=near, atol=near, equal_nan=True)
        if is_dense(whole):
            shown = [value_of(node) for node in (whole, joined)]
            dims = [dim for dim, size in enumerate(shown[0].shape) if size > 1]
            assert len({tuple(value.stride(dim) for dim in dims) for value in shown}) == 1


def _of_rank(value: Tensor, rank: int) -> Tensor:
    """Other data on every rank, in the same order in memory."""
    if rank == 0 or not value.is_floating_point():
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    own = value.new_zeros(extent).as_strided(value.shape, value.stride())
    return own.copy_(value + rank)


def _in_heads(built: _Built, draw: Draw) -> Node:
    count = draw(st.sampled_from((2, 3)))

    def possible(node: Node) -> list[HeadCut]:
        return [
            HeadCut(dim, outer)
            for dim, size in enumerate(value_of(node).shape)
            for outer in range(1, size + 1)
            if divides(outer * count, size)
        ]

    inside = _cut_some(built, possible, draw)
    cuts, outside = dict(inside), {}
    for node in built.nodes:
        cuts[node] = common_cut(node, cuts, count)
        outside.update(cuts_outside(node, cuts))
    chunks = HeadChunks(built.graph, count, cuts, outside)
    for number, copies in enumerate(chunks.copies):
        copies.update({node: chunks.part(node, cut, number) for node, cut in inside.items()})
        chunks.copy_all(built.nodes, number)
    return chunks.join(built.nodes[-1])


class _Runs(RowRuns):
    def emit(self, inside: Inside, nodes: list[Node]) -> Node:
        for node, cut in inside.items():
            self.runs[node] = [
                self._part(node, cut, number) if length else None
                for number, length in enumerate(cut.lengths)
            ]
        for node in nodes:
            self.runs[node] = self._runs_of(node)
        return self._whole(nodes[-1])


def _in_rows(built: _Built, draw: Draw) -> Node:
    shares = draw(st.lists(st.integers(0, 3), min_size=2, max_size=3))

    def possible(node: Node) -> list[RowCut]:
        return [
            RowCut(dim, outer, lengths)
            for dim, size in enumerate(value_of(node).shape)
            for outer in range(1, size + 1)
            if size % outer == 0 and (lengths := _lengths(size // outer, shares))
        ]

    inside = _cut_some(built, possible, draw)
    steps = {node: RowStep(cut, ()) for node, cut in inside.items()}
    for node in built.nodes:
        reads = {source: steps[source].cut for source in node.all_input_nodes if source in steps}
        steps[node] = step_rows(node, reads, frozenset(built.nodes))
    return _Runs(built.graph, RowPlan(steps, len(shares), {})).emit(inside, built.nodes)


def _lengths(rows: int, shares: list[int]) -> tuple[int, ...]:
    """Runs of about these shares, empty if there are not two rows or two runs."""
    total = sum(shares)
    if rows < 2 or sum(share > 0 for share in shares) < 2:
        return ()
    ends = [rows * sum(shares[: n + 1]) // total for n in range(len(shares))]
    lengths = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
    return lengths if max(lengths) < rows else ()


def _cut_some(built: _Built, possible: Callable[[Node], list[Any]], draw: Draw) -> Inside:
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
            cuts = [item for item in cuts if item == dataclasses.replace(cut, dim=dim)]
        if cuts:
            inside[node] = draw(st.sampled_from(cuts))
    return inside


CUTTERS = {"heads": _in_heads, "rows": _in_rows}
RULES = {"heads": {*HEAD_RULES}, "rows": {*ROW_RULES, *ONE_OPERAND_RULES, ALL_TO_ALL}}


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


FAMILY_CASES = [
    (family, what)
    for what, ruled in RULES.items()
    for family, ops in FAMILIES.items()
    if ops & ruled
]
OP_CASES = [
    pytest.param(op, what, id=f"{what}-{op}")
    for what, ruled in RULES.items()
    for op in sorted(ruled & set(CALLS), key=str)
]


@pytest.mark.parametrize(("family", "what"), FAMILY_CASES)
def test_cutting_before_an_op_is_cutting_behind_it(family: str, what: str) -> None:
    _hold(FAMILIES[family] & RULES[what], what, 80)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "what"), OP_CASES)
def test_cutting_before_each_op_is_cutting_behind_it(op: Any, what: str) -> None:
    _hold({op}, what, 40 if op in POINTWISE else 400)


def _built(op: Any, *args: Any, **kwargs: Any) -> _Built:
    return _Built(OpCall(op, args, kwargs))


@pytest.mark.parametrize("op", [aten.mean.dim, aten.sum.dim_IntList])
def test_sums_of_columns_are_not_cut(op: Any) -> None:
    """How many columns kernels sum at a time, and in which order, depends on how many there are."""
    x = torch.randn(2, 48, 4, 8)
    built = _built(op, x, [1], True)
    (node,) = built.inputs
    with pytest.raises(CutUnknown, match="order"):
        common_cut(built.nodes[0], {node: HeadCut(2, 1)}, 2)
    with pytest.raises(CutUnknown, match="order"):
        step_rows(built.nodes[0], {node: RowCut(2, 1, (2, 2))}, frozenset())
    rows_outside = _built(op, x, [3], True)
    (node,) = rows_outside.inputs
    assert common_cut(rows_outside.nodes[0], {node: HeadCut(2, 1)}, 2) == HeadCut(2, 1)


def test_a_broadcast_matrix_holds_no_batch() -> None:
    built = _built(
        aten.baddbmm.default, torch.randn(4, 6), torch.randn(4, 4, 2), torch.randn(4, 2, 6)
    )
    matrix, left, right = built.inputs
    cut = HeadCut(0, 1)
    with pytest.raises(CutUnknown, match="dim 0 of an operand of 2 dims"):
        common_cut(built.nodes[0], {matrix: cut, left: cut, right: cut}, 2)


def test_a_causal_attention_is_not_cut_by_rows() -> None:
    """Which keys a query sees depends on its place among all queries."""
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    for is_causal in (False, True):
        built = _built(op, q, k, v, 0.0, is_causal)
        reads = {next(iter(built.inputs)): RowCut(2, 1, (2, 2))}
        if not is_causal:
            assert step_rows(built.nodes[0], reads, frozenset()).cut == RowCut(2, 1, (2, 2))
            continue
        with pytest.raises(CutUnknown, match="causal"):
            step_rows(built.nodes[0], reads, frozenset())


def test_a_slice_may_end_inside_a_chunk() -> None:
    built = _built(aten.slice.Tensor, torch.randn(8, 3), 0, 1, 6)
    (node,) = built.inputs
    cut = RowCut(0, 1, (4, 4))
    steps = {node: RowStep(cut, ())}
    steps[built.nodes[0]] = step_rows(built.nodes[0], {node: cut}, frozenset())
    assert steps[built.nodes[0]].cut == RowCut(0, 1, (3, 2))
    built.compare(_Runs(built.graph, RowPlan(steps, 2, {})).emit({node: cut}, built.nodes))


def test_an_op_that_is_in_no_table_is_refused() -> None:
    for op in (aten.cumsum.default, aten.flip.default, aten.equal.default, aten.rrelu.default):
        assert op not in TABLED
    built = _built(aten.cumsum.default, torch.randn(2, 4), 1)
    (node,) = built.inputs
    with pytest.raises(CutUnknown, match="may mix heads"):
        common_cut(built.nodes[0], {node: HeadCut(0, 1)}, 2)
    with pytest.raises(CutUnknown, match="may mix rows"):
        step_rows(built.nodes[0], {node: RowCut(0, 1, (1, 1))}, frozenset())
