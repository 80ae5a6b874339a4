"""Where runs of tokens lie in a tensor, followed through all that computes row by row.

A `RowCut` says that a dim is [outer, rows and what is inside of them], and that the rows of each of
the `outer` blocks are cut into runs of the same `lengths`. A length is 0 where a tensor has no
rows of a run: the text of a joint sequence may lie in the first run as a whole. Of rows that were
`picked` there are two runs, those and the rest.

    [B, S, C], rows of this rank                   dim 1, outer 1, (a, S - a)
    [B*S, C], as a matmul reads them               dim 0, outer B, (a, S - a)
    [B, h, P*S, D], rows of all ranks              dim 2, outer P, (a, S - a)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from cocodiff_compile.cut.head_cut import (
    REDUCING,
    CutUnknown,
    reduced_dims,
    refuse_inner_cut,
    refuse_other_order,
)
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    CONCATENATION,
    COPY,
    PERMUTE,
    RESHAPE,
    SLICING,
    SOFTMAX,
    aten,
    bound,
    is_pointwise,
    is_tensor,
    matmul_operands,
    padding_of,
    parse_fused_attention,
    permutation,
    shape_of,
    slice_of,
)
from cocodiff_compile.ir.attention_ops import ATTENTION_OPS, FUSED_ATTENTION
from cocodiff_compile.ir.layout import known
from cocodiff_compile.ir.pointwise import POINTWISE


@dataclass(frozen=True)
class RowCut:
    dim: int
    outer: int
    lengths: tuple[int, ...]
    picked: int = 0
    """If runs are no stretches: how many rows from anywhere the first one holds, in their order."""

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def run(self, number: int) -> tuple[int, int]:
        """Where a run begins and ends in its block."""
        begin = sum(self.lengths[:number])
        return begin, begin + self.lengths[number]

    def at(self, dim: int) -> RowCut:
        return replace(self, dim=dim)


@dataclass(frozen=True)
class RowStep:
    """The cut of a node, and the inputs it reads run by run; it reads the others as a whole."""

    cut: RowCut
    by_run: tuple[Node, ...]


@dataclass(frozen=True)
class RowPlan:
    """What of a graph is computed run by run, and where the runs lie."""

    steps: Mapping[Node, RowStep]
    count: int
    stopped: Mapping[Node, str]
    """What reads something cut but cannot be cut itself, and why."""


def sizes_of(node: Node) -> tuple[int, ...]:
    sizes = [known(size) for size in shape_of(node)]
    if None in sizes:
        raise CutUnknown(f"{node.name} has a symbolic size")
    return tuple(size for size in sizes if size is not None)


def step_rows(node: Node, cuts: Mapping[Node, RowCut], exchanges: frozenset[Node]) -> RowStep:
    """How a node that reads something cut can be computed run by run."""
    rule, one_rule = ROW_RULES.get(node.target), ONE_OPERAND_RULES.get(node.target)
    if rule is not None:
        step = rule(node, cuts)
    elif node.target is ALL_TO_ALL:
        step = _exchanged(node, cuts, exchanges)
    elif one_rule is not None:
        operand = node.all_input_nodes[0]
        if operand not in cuts or len(node.all_input_nodes) > 1:
            raise CutUnknown(f"{node.target} ({node.name}) may mix rows")
        step = RowStep(one_rule(cuts[operand], operand, node), (operand,))
    else:
        raise CutUnknown(f"{node.target} ({node.name}) may mix rows")
    if is_tensor(node) and 0 in sizes_of(node):
        raise CutUnknown(f"{node.name} has no element")
    return step


def _copied(cut: RowCut, _operand: Node, _node: Node) -> RowCut:
    return cut


def _permuted(cut: RowCut, operand: Node, node: Node) -> RowCut:
    return cut.at(permutation(node, len(shape_of(operand))).index(cut.dim))


def _reshaped(cut: RowCut, operand: Node, node: Node) -> RowCut:
    return reshaped_cut(cut, sizes_of(operand), sizes_of(node), node)


_ALIGNED = frozenset({aten.expand.default, aten.slice_scatter.default})
"""Whose tensors are aligned at their last dims, as those of pointwise ops are."""
_REDUCING = REDUCING | {aten.amin.default, aten.var_mean.correction, aten.var.correction}
_COMPLEX = frozenset({aten.view_as_complex.default, aten.view_as_real.default, aten._conj.default})


def _exchanged(node: Node, cuts: Mapping[Node, RowCut], exchanges: frozenset[Node]) -> RowStep:
    if node not in exchanges:
        raise CutUnknown(f"{node.name} is no exchange of a Ulysses attention")
    operand = bound(node)["input"]
    cut = cuts[operand]
    num_ranks = len(bound(node)["input_split_sizes"])
    if cut.dim == 0 and cut.outer % num_ranks:
        raise CutUnknown(f"{node.name} sends blocks of rows that are cut")
    return RowStep(cut, (operand,))


def reshaped_cut(cut: RowCut, before: Sequence[int], after: Sequence[int], node: Node) -> RowCut:
    """Where the same rows lie in `node`, whose sizes are `after`, if elements keep their order."""
    blocks = math.prod(before[: cut.dim]) * cut.outer
    ahead = 1
    scaled = None
    for dim, size in enumerate(after):
        if blocks % ahead == 0 and size % (outer := blocks // ahead) == 0:
            rows = size // outer
            if rows == cut.rows:
                return replace(cut, dim=dim, outer=outer)
            if scaled is None and rows > 1 and _can_scale(cut, rows):
                lengths = tuple(n * rows // cut.rows for n in cut.lengths)
                scaled = replace(cut, dim=dim, outer=outer, lengths=lengths)
        ahead *= size
    if scaled is None:
        raise CutUnknown(f"{node.name} joins rows with what is outside of them, or cuts them")
    return scaled


def _can_scale(cut: RowCut, rows: int) -> bool:
    """Whether so many blocks stand for all rows; what was picked by the row lies in no block."""
    is_whole = all(length * rows % cut.rows == 0 for length in cut.lengths)
    return is_whole and cut.lengths[0] * rows // cut.rows >= cut.picked


def _attention(node: Node, cuts: Mapping[Node, RowCut]) -> RowStep:
    """A query sees all keys and values, and no other query."""
    op, attention = ATTENTION_OPS[node.target], parse_fused_attention(node)
    if not op.has_independent_queries:
        raise CutUnknown(f"{node.name} may look at the places of its rows")
    if attention.query not in cuts or cuts[attention.query].dim != op.token_dim:
        raise CutUnknown(f"{node.name} reads its query as a whole")
    if attention.query in (attention.key, attention.value, attention.mask):
        raise CutUnknown(f"{node.name} reads its query as a whole too")
    if attention.is_causal or attention.has_dropout:
        raise CutUnknown(f"{node.name} is causal, or draws random numbers")
    if any(user.target is operator.getitem and user.args[1] != op.output for user in node.users):
        raise CutUnknown(f"{node.name} has other results than its output")
    sizes_of(attention.key), sizes_of(attention.value)
    if attention.mask is not None and sizes_of(attention.mask)[-2:-1] not in ((), (1,)):
        raise CutUnknown(f"{node.name} has a mask with a row per query")
    return RowStep(cuts[attention.query], (attention.query,))


def _matmul(node: Node, cuts: Mapping[Node, RowCut]) -> RowStep:
    """Rows of the left operand are rows of the product."""
    left, right = matmul_operands(node)
    dim = 1 if node.target is aten.bmm.default else 0
    if left not in cuts or cuts[left].dim != dim or right in cuts:
        raise CutUnknown(f"{node.name} sums over what is cut")
    if node.target is aten.addmm.default and len(shape_of(bound(node)["self"])) > 1:
        raise CutUnknown(f"{node.name} adds a matrix")
    return RowStep(cuts[left], (left,))


def _sliced(cut: RowCut, operand: Node, node: Node) -> RowCut:
    if node.target is operator.getitem and operand.target not in SLICING:
        return cut  # one of several results
    if not is_tensor(node):
        return cut  # the getitem that follows picks the part
    slicing = operand if node.target is operator.getitem else node
    whole = bound(slicing)["self"]
    dim = bound(slicing)["dim"] % len(shape_of(whole))
    if dim == cut.dim:
        return _taken(cut, slicing, node)
    drops_dim = slicing.target in (aten.select.int, aten.unbind.int)
    return cut.at(cut.dim - 1) if drops_dim and dim < cut.dim else cut


def _taken(cut: RowCut, slicing: Node, node: Node) -> RowCut:
    if slicing.target in (aten.select.int, aten.unbind.int):
        raise CutUnknown(f"{slicing.name} takes one row")
    begin, end = taken_rows(slicing, node)
    if (begin, end) == (0, cut.outer * cut.rows):
        return cut
    if cut.outer != 1 or cut.picked:
        raise CutUnknown(f"{slicing.name} takes rows of several blocks, or of those picked")
    if begin == end:
        raise CutUnknown(f"{slicing.name} takes no row")
    runs = (cut.run(number) for number in range(len(cut.lengths)))
    return replace(cut, lengths=tuple(max(0, min(end, e) - max(begin, b)) for b, e in runs))


def taken_rows(slicing: Node, node: Node) -> tuple[int, int]:
    """From where to where a slice, or one result of a split, reaches."""
    part = slice_of(slicing, node if slicing is not node else None)
    begin, length = (None, None) if part is None else (known(part[1]), known(part[2]))
    if begin is None or length is None:
        raise CutUnknown(f"{slicing.name} takes rows that are not known")
    return begin, begin + length


def _concatenated(node: Node, cuts: Mapping[Node, RowCut]) -> RowStep:
    dim, tensors = _dim_argument(node), bound(node)["tensors"]
    if len({len(shape_of(item)) for item in tensors}) > 1:
        raise CutUnknown(f"{node.name} joins tensors of different numbers of dims")
    found = [cuts[item] for item in tensors if item in cuts]
    if node.target is aten.cat.default and found[0].dim == dim:
        return RowStep(_joined_rows(node, tensors, cuts), tuple(tensors))
    _refuse_different(node, found)
    is_stack = node.target is aten.stack.default
    cut = found[0].at(found[0].dim + 1) if is_stack and dim <= found[0].dim else found[0]
    return RowStep(cut, tuple(tensors))


def _joined_rows(node: Node, tensors: Sequence[Node], cuts: Mapping[Node, RowCut]) -> RowCut:
    """Tensors one behind the other: each run must stay one stretch of rows."""
    lengths = joined_lengths(node, tensors, cuts)
    picked = sum(cut.picked for cut in cuts.values())
    if picked and len(cuts) < len(tensors):
        raise CutUnknown(f"{node.name} joins rows of which none were picked")
    filled = [number for item in lengths for number, length in enumerate(item) if length]
    if not picked and any(first > second for first, second in itertools.pairwise(filled)):
        raise CutUnknown(f"{node.name} puts runs of rows between each other")
    return RowCut(_dim_argument(node), 1, tuple(map(sum, zip(*lengths, strict=True))), picked)


def joined_lengths(
    node: Node, tensors: Sequence[Node], cuts: Mapping[Node, RowCut]
) -> list[tuple[int, ...]]:
    """The rows of each run in each tensor that is joined; one that is not cut lies in the run that
    the next one begins with, or in the last.
    """
    dim = _dim_argument(node)
    number_of_runs = len(next(cuts[item] for item in tensors if item in cuts).lengths)
    found: list[tuple[int, ...]] = []
    run = number_of_runs - 1
    for item in reversed(tensors):
        cut = cuts.get(item)
        if cut is None:
            rows = sizes_of(item)[dim]
            found.append(tuple(rows if n == run else 0 for n in range(number_of_runs)))
            continue
        if (cut.dim, cut.outer) != (dim, 1):
            raise CutUnknown(f"{node.name} joins rows of several blocks")
        found.append(cut.lengths)
        run = next(n for n, length in enumerate(cut.lengths) if length)
    return found[::-1]


def _aligned(node: Node, cuts: Mapping[Node, RowCut]) -> RowStep:
    if not is_tensor(node):
        raise CutUnknown(f"{node.name} has several results")
    shape = sizes_of(node)
    operands = [item for item in node.all_input_nodes if is_tensor(item)]
    found = []
    for item in operands:
        if item not in cuts:
            continue
        cut, own = cuts[item], sizes_of(item)
        shifted = cut.at(cut.dim + len(shape) - len(own))
        if shape[shifted.dim] != own[cut.dim]:
            raise CutUnknown(f"{node.name} repeats rows")
        found.append(shifted)
    _refuse_different(node, found)
    if node.target is aten.slice_scatter.default and _dim_argument(node) == found[0].dim:
        raise CutUnknown(f"{node.name} writes some of the rows")
    for item in operands:
        run_of_operand(node, item, found[0])
    return RowStep(found[0], tuple(operands))


def run_of_operand(node: Node, operand: Node, cut: RowCut) -> RowCut | None:
    """How an operand of a node with this cut is cut, None if it has the same for every row."""
    dim = cut.dim
    if node.target is aten.stack.default:
        dim -= _dim_argument(node) < cut.dim
    elif is_pointwise(node) or node.target in _ALIGNED:
        dim -= len(shape_of(node)) - len(shape_of(operand))
    if dim < 0 or (size := sizes_of(operand)[dim]) == 1:
        return None
    if size != cut.outer * cut.rows:
        raise CutUnknown(f"{node.name} reads {operand.name}, whose rows are unclear")
    return cut.at(dim)


def _dim_argument(node: Node) -> int:
    dim: int = bound(node)["dim"] % len(shape_of(node))
    return dim


def _refuse_different(node: Node, found: Sequence[RowCut]) -> None:
    if any(cut != found[0] for cut in found):
        raise CutUnknown(f"{node.name} joins tensors whose rows are cut at different places")


def _reduced(cut: RowCut, _operand: Node, node: Node) -> RowCut:
    dims = reduced_dims(node)
    if cut.dim in dims:
        raise CutUnknown(f"{node.name} reduces over rows")
    refuse_other_order(node, cut.dim, dims)
    dropped = 0 if bound(node)["keepdim"] else sum(dim < cut.dim for dim in dims)
    return cut.at(cut.dim - dropped)


def _unchanged(cut: RowCut, operand: Node, node: Node) -> RowCut:
    before, after = sizes_of(operand), sizes_of(node)
    if cut.dim >= len(after) or before[cut.dim] != after[cut.dim]:
        raise CutUnknown(f"{node.target} ({node.name}) may mix rows")
    return cut


def _normalised(cut: RowCut, _operand: Node, node: Node) -> RowCut:
    dim = bound(node)["dim"] % len(shape_of(node))
    if dim == cut.dim:
        raise CutUnknown(f"{node.name} is over rows")
    refuse_inner_cut(node, cut.dim, dim)
    return cut


def _padded(cut: RowCut, _operand: Node, node: Node) -> RowCut:
    """A pad may drop as many rows in front as it adds behind: sizes tell nothing."""
    if padding_of(node, cut.dim) != (0, 0):
        raise CutUnknown(f"{node.name} moves rows")
    return cut


ROW_RULES: Mapping[Any, Callable[[Node, Mapping[Node, RowCut]], RowStep]] = {
    **dict.fromkeys(FUSED_ATTENTION, _attention),
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default), _matmul),
    **dict.fromkeys(CONCATENATION, _concatenated),
    **dict.fromkeys(POINTWISE | _ALIGNED, _aligned),
}
"""How ops that may read several tensors are computed run by run."""

ONE_OPERAND_RULES: Mapping[Any, Callable[[RowCut, Node, Node], RowCut]] = {
    **dict.fromkeys(COPY, _copied),
    **dict.fromkeys(RESHAPE, _reshaped),
    **dict.fromkeys(PERMUTE, _permuted),
    **dict.fromkeys(SLICING, _sliced),
    **dict.fromkeys(_REDUCING, _reduced),
    **dict.fromkeys(SOFTMAX, _normalised),
    **dict.fromkeys(_COMPLEX, _unchanged),
    operator.getitem: _sliced,
    aten.constant_pad_nd.default: _padded,
}
"""Where the rows of an op's result lie, given those of its only operand. Rows are not followed
through an op that is in neither table.
"""
