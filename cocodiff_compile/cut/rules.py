# SPDX-License-Identifier: Apache-2.0
"""The rules by which a cut passes an op: where the chunks of its result lie, and which operands it
reads chunk by chunk.

`CUT_RULES` is the one table. A cut is not followed through an op that is neither listed there nor
known as an attention (`ir/attention_ops.py`). A rule speaks about the dim that is cut: attention
cut at its heads reads chunks of query, key and value, and at its tokens of the query only; `bmm`
reads chunks of both operands at dim 0, of the left one at dim 1.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.cut import view_rules
from cocodiff_compile.cut.cut import Cut, CutUnknown, Step, numbers
from cocodiff_compile.cut.joining import is_dense
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    BATCHED_MATMUL,
    CONCATENATION,
    COPY,
    PERMUTE,
    RESHAPE,
    SLICING,
    SOFTMAX,
    FusedAttention,
    aten,
    bound,
    is_tensor,
    matmul_operands,
    parse_fused_attention,
    shape_of,
    value_of,
)
from cocodiff_compile.ir.attention_ops import attention_op, is_attention
from cocodiff_compile.ir.layout import Size, same
from cocodiff_compile.ir.parts import kept
from cocodiff_compile.ir.pointwise import POINTWISE

Cuts = Mapping[Node, Cut]
"""The inputs of a node that are cut, each with its cut."""
Rule = Callable[[Node, Cuts], Step]


def step_cut(node: Node, cuts: Cuts) -> Step:
    """Returns how a node is computed chunk by chunk. Raises CutUnknown if no rule allows it."""
    rule = _attended if is_attention(node.target) else CUT_RULES.get(node.target)
    if rule is None:
        raise CutUnknown(f"{node.target} ({node.name}) may mix chunks")
    if is_tensor(node) and any(same(size, 0) for size in shape_of(node)):
        raise CutUnknown(f"{node.name} has no element")
    return rule(node, cuts)


def tensor_inputs(node: Node) -> list[Node]:
    """Returns the inputs of a node that are tensors, each once."""
    return [item for item in node.all_input_nodes if is_tensor(item)]


def cut_of_operand(node: Node, operand: Node, cut: Cut) -> Cut | None:
    """Returns how an operand is cut that a node with this cut reads by chunk, None if it has the
    same for every chunk. Raises CutUnknown if its size fits neither.
    """
    shape, own = _result_shape(node), shape_of(operand)
    if is_attention(node.target):
        dim = _dim_of_attended(node, operand, cut.dim)
    elif node.target is aten.stack.default:
        dim = cut.dim - (_dim_argument(node) < cut.dim)
    else:
        dim = cut.dim - len(shape) + len(own)
    if dim < 0 or same(own[dim], 1):
        return None
    if not same(own[dim], shape[cut.dim]):
        raise CutUnknown(f"{node.name} reads {operand.name}, whose chunks are unclear")
    return cut.at(dim)


def _result_shape(node: Node) -> tuple[Size, ...]:
    """Returns the shape of a node, or of the result of several that counts."""
    if is_tensor(node):
        return shape_of(node)
    op = attention_op(node.target)
    return tuple(node.meta["val"][op.output if op else 0].shape)


def _dim_argument(node: Node) -> int:
    dim: int = bound(node)["dim"] % len(shape_of(node))
    return dim


def _common(node: Node, found: Sequence[Cut]) -> Cut:
    if not all(cut.is_like(found[0]) for cut in found):
        raise CutUnknown(f"{node.name} joins tensors that are cut at different places")
    return found[0]


def _reading(node: Node, cut: Cut, operands: Sequence[Node], cuts: Cuts) -> Step:
    """Returns the step of a node that reads its chunk of all these operands."""
    for item in operands:
        if item not in cuts:
            cut_of_operand(node, item, cut)
    return Step(cut, tuple(operands))


def _one_operand(follow: Callable[[Cut, Node, Node], Cut]) -> Rule:
    """Returns the rule of an op that reads one tensor; `follow` says where its chunks then lie."""

    def rule(node: Node, cuts: Cuts) -> Step:
        operand, *others = node.all_input_nodes
        if operand not in cuts or any(map(is_tensor, others)):
            raise CutUnknown(f"{node.target} ({node.name}) reads a tensor that is not cut")
        return Step(follow(cuts[operand], operand, node), (operand,))

    return rule


def _aligned(node: Node, cuts: Cuts) -> Step:
    """Shapes are aligned at their last dims."""
    if not is_tensor(node):
        raise CutUnknown(f"{node.name} has several results")
    shape, operands = shape_of(node), tensor_inputs(node)
    found = []
    for item in filter(cuts.__contains__, operands):
        cut, own = cuts[item], shape_of(item)
        found.append(cut.at(cut.dim + len(shape) - len(own)))
        if not same(shape[found[-1].dim], own[cut.dim]):
            raise CutUnknown(f"{node.name} repeats what is cut")
    cut = _common(node, found)
    return _reading(node, cut, operands, cuts)


def _written(node: Node, cuts: Cuts) -> Step:
    """Rows are written chunk by chunk where they are the shares of ranks, segment by segment."""
    whole, rows = bound(node)["self"], bound(node)["src"]
    dim = _dim_argument(node)
    if all(cut.dim != dim for cut in cuts.values()):
        return _aligned(node, cuts)
    cut = cuts.get(whole)
    if cut is None or rows not in cuts or not cut.segments or not same(cut.outer, 1):
        raise CutUnknown(f"{node.name} writes a part of what is cut")
    first, last = view_rules.segments_within(cut, *view_rules.written_range(node), node)
    if whole is rows or not cuts[rows].is_like(cut.with_segments(cut.segments[first:last])):
        raise CutUnknown(f"{node.name} writes rows that are cut at other places")
    return Step(cut, (whole, rows))


def _attended(node: Node, cuts: Cuts) -> Step:
    """Heads do not see each other; a query sees all keys and values, and no other query."""
    attention = parse_repeatable(node)
    op = attention.op
    cut = cuts.get(attention.query)
    if cut is None or cut.dim != op.token_dim:
        if not op.has_independent_heads:
            raise CutUnknown(f"{node.name} may look at the places of its heads")
        return _batched(node, cuts, op.head_dim, partial(_dim_of_heads, node, attention))
    if not op.has_independent_queries:
        raise CutUnknown(f"{node.name} may look at the places of its rows")
    refuse_other_operands(node, attention)
    if attention.query in (attention.key, attention.value, attention.mask):
        raise CutUnknown(f"{node.name} reads its query as a whole too")
    if attention.placed_by:
        given = ", ".join(attention.placed_by)
        raise CutUnknown(f"which keys a query of {node.name} sees depends on its place ({given})")
    mask_rows = shape_of(attention.mask)[-2:-1] if attention.mask is not None else ()
    if not all(same(size, 1) for size in mask_rows):
        raise CutUnknown(f"{node.name} has a mask with a row per query")
    return Step(cut, (attention.query,))


def parse_repeatable(node: Node) -> FusedAttention:
    """Returns the arguments of an attention. Raises CutUnknown if it draws random numbers, or if
    other results than its output are read.
    """
    attention = parse_fused_attention(node)
    if attention.has_dropout:
        raise CutUnknown(f"{node.name} draws random numbers")
    output = attention.op.output
    if any(user.target is operator.getitem and user.args[1] != output for user in node.users):
        raise CutUnknown(f"{node.name} has other results than its output")
    return attention


def refuse_other_operands(node: Node, attention: FusedAttention) -> None:
    """Raises CutUnknown if an attention reads more tensors than those every attention has."""
    roles = {attention.query, attention.key, attention.value, attention.mask}
    if {*tensor_inputs(node)} - roles:
        raise CutUnknown(f"{node.name} reads more than query, key, value and mask")


def _dim_of_heads(node: Node, attention: FusedAttention, operand: Node) -> int:
    """Returns the dim of an operand that counts heads, below 0 if it has none there."""
    op = attention.op
    is_role = operand in (attention.query, attention.key, attention.value)
    if is_role and len(shape_of(operand)) != op.num_dims:
        return -1
    return _dim_of_attended(node, operand, op.head_dim)


def _dim_of_attended(node: Node, operand: Node, dim: int) -> int:
    """Returns the dim of an operand of an attention that lies as `dim` of its output does; below 0
    if it has none. Raises CutUnknown if it is not known what the operand holds.
    """
    attention = parse_fused_attention(node)
    dims = set()
    if operand in (attention.query, attention.key, attention.value):
        dims.add(dim)
    if operand is attention.mask:
        dims.add(len(shape_of(operand)) - (3 if dim == attention.op.head_dim else 2))
    if operand in attention.per_head:
        rank, own = len(shape_of(operand)), attention.per_head[operand]
        if not -rank <= own < rank:
            raise CutUnknown(f"{node.name} reads {operand.name}, which has no dim {own} of heads")
        dims.add(own % rank)
    if operand in attention.shared:
        dims.add(-1)
    if len(dims) != 1:
        raise CutUnknown(f"{node.name} reads {operand.name}, and what that holds is unclear")
    return dims.pop()


def _multiplied(node: Node, cuts: Cuts) -> Step:
    """Rows of the left operand are rows of the product; the products of a batch are apart."""
    left, right = matmul_operands(node)
    has_rows = left in cuts and cuts[left].dim == len(shape_of(node)) - 2
    if node.target in BATCHED_MATMUL and not (has_rows and node.target is aten.bmm.default):
        return _batched(node, cuts, 0, lambda item: 0 if len(shape_of(item)) == 3 else -1)
    if not has_rows or right in cuts:
        raise CutUnknown(f"{node.name} sums over what is cut")
    if node.target is aten.addmm.default and len(shape_of(bound(node)["self"])) > 1:
        raise CutUnknown(f"{node.name} adds a matrix")
    return Step(cuts[left], (left,))


def _scaled(node: Node, cuts: Cuts) -> Step:
    """Rows of the left operand are rows of the product, each with its own scale or one for all."""
    arguments = bound(node)
    left, scale = arguments["self"], arguments["scale_a"]
    if left not in cuts or cuts[left].dim != 0 or cuts.keys() - {left, scale}:
        raise CutUnknown(f"{node.name} sums over what is cut")
    if all(same(size, 1) for size in shape_of(scale)):
        return Step(cuts[left], (left,))
    rows = shape_of(left)[0]
    is_by_row = len(shape_of(scale)) == 2 and all(map(same, shape_of(scale), (rows, 1)))
    if not is_by_row or not cuts.get(scale, cuts[left]).is_like(cuts[left]):
        raise CutUnknown(f"{node.name} scales blocks of rows, or other rows than it multiplies")
    return Step(cuts[left], (left, scale))


def _batched(node: Node, cuts: Cuts, dim: int, dim_of: Callable[[Node], int]) -> Step:
    """Returns the step of an op whose result is cut at `dim`, and every operand at the dim that
    `dim_of` says; in one of fewer dims, which is broadcast, there may be none.
    """
    operands = tensor_inputs(node)
    inside = [item for item in operands if item in cuts]
    for item in inside:
        if cuts[item].dim != dim_of(item):
            where = f"in dim {dim_of(item)}" if dim_of(item) >= 0 else "not in it"
            raise CutUnknown(
                f"{node.name} is cut at dim {cuts[item].dim} of {item.name}; its batch or its "
                f"heads are {where}"
            )
    cut = _common(node, [cuts[item].at(dim) for item in inside])
    if not same(shape_of(inside[0])[cuts[inside[0]].dim], _result_shape(node)[dim]):
        raise CutUnknown(f"{node.name} repeats what is cut")
    return _reading(node, cut, operands, cuts)


def _concatenated(node: Node, cuts: Cuts) -> Step:
    dim, tensors = _dim_argument(node), bound(node)["tensors"]
    if len({len(shape_of(item)) for item in tensors}) > 1:
        raise CutUnknown(f"{node.name} joins tensors of different numbers of dims")
    found = [cuts[item] for item in tensors if item in cuts]
    if node.target is aten.cat.default and found[0].dim == dim:
        return Step(_joined(node, tensors, cuts), tuple(tensors))
    cut = _common(node, found)
    if node.target is aten.stack.default and dim <= cut.dim:
        cut = cut.at(cut.dim + 1)
    return _reading(node, cut, tensors, cuts)


def _joined(node: Node, tensors: Sequence[Node], cuts: Cuts) -> Cut:
    """Returns the cut of tensors one behind the other: each chunk must stay one stretch."""
    if any(cut.segments for cut in cuts.values()):
        return _joined_shares(node, tensors, cuts)
    lengths = joined_lengths(node, tensors, cuts)
    selected = sum(cut.selected for cut in cuts.values())
    if selected and len(cuts) < len(tensors):
        raise CutUnknown(f"{node.name} joins rows of which none were selected")
    filled = [number for item in lengths for number, length in enumerate(item) if length]
    if not selected and any(first > second for first, second in itertools.pairwise(filled)):
        raise CutUnknown(f"{node.name} puts chunks between each other")
    return Cut(_dim_argument(node), 1, tuple(map(sum, zip(*lengths, strict=True))), selected)


def _joined_shares(node: Node, tensors: Sequence[Node], cuts: Cuts) -> Cut:
    """Returns the cut whose segments are those of all tensors, one behind the other."""
    dim = _dim_argument(node)
    segments: list[Size] = []
    for item in tensors:
        cut = cuts.get(item)
        if cut is not None and (cut.dim != dim or not same(cut.outer, 1)):
            raise CutUnknown(f"{node.name} joins rows of several blocks")
        segments += cut.segments if cut else shape_of(item)[dim : dim + 1]
    return next(iter(cuts.values())).with_segments(segments).at(dim)


def joined_lengths(node: Node, tensors: Sequence[Node], cuts: Cuts) -> list[tuple[int, ...]]:
    """Returns the lengths of all chunks in each tensor that is joined. One that is not cut lies in
    the chunk that the next one begins with, or in the last. Raises CutUnknown for several blocks.
    """
    dim = _dim_argument(node)
    count = next(cuts[item] for item in tensors if item in cuts).count
    found: list[tuple[int, ...]] = []
    chunk = count - 1
    for item in reversed(tensors):
        cut = cuts.get(item)
        if cut is None:
            (size,) = numbers(shape_of(item)[dim : dim + 1], item)
            found.append(tuple(size if n == chunk else 0 for n in range(count)))
            continue
        if cut.dim != dim or not same(cut.outer, 1):
            raise CutUnknown(f"{node.name} joins rows of several blocks")
        found.append(numbers(cut.lengths, item))
        chunk = next(n for n, length in enumerate(found[-1]) if length)
    return found[::-1]


def _reduced(cut: Cut, operand: Node, node: Node) -> Cut:
    arguments = bound(node)
    rank = len(shape_of(arguments["self"]))
    dims = {dim % rank for dim in arguments["dim"] or range(rank)}
    if cut.dim in dims:
        raise CutUnknown(f"{node.name} reduces over what is cut")
    if not cut.segments:
        _refuse_other_order(node, cut.dim, dims)
    is_exact = same(cut.outer, 1) or is_dense(operand) or cut.segments
    if node.target in SUMMING and not is_exact:
        raise CutUnknown(f"{node.name} sums what lies in memory with gaps, which copies have not")
    dropped = 0 if arguments["keepdim"] else sum(dim < cut.dim for dim in dims)
    return cut.at(cut.dim - dropped)


def _refuse_other_order(node: Node, cut_dim: int, dims: Collection[int]) -> None:
    """A sum whose terms lie further apart in memory than what is cut runs over columns, and kernels
    sum as many columns at a time as there are: fewer of them may give other bits.
    """
    if node.target in ORDERLESS:
        return
    value = value_of(bound(node)["self"])
    strides = [optimization_hint(stride) for stride in value.stride()]
    for dim in dims:
        if strides[dim] > strides[cut_dim] and not same(value.shape[dim], 1):
            raise CutUnknown(f"{node.name} sums in an order that depends on what lies beside")


def _normalised(cut: Cut, _operand: Node, node: Node) -> Cut:
    """A softmax sums too; it first copies an operand that is not contiguous."""
    dim = _dim_argument(node)
    if dim == cut.dim:
        raise CutUnknown(f"{node.name} is over what is cut")
    if cut.dim > dim and not cut.segments:
        raise CutUnknown(f"{node.name} sums in an order that depends on what lies beside")
    return cut


def _indexed(node: Node, cuts: Cuts) -> Step:
    """A list of places in another dim takes the same ones from every chunk."""
    found, whole = kept(node), bound(node)["self"]
    if found is None or whole not in cuts or found[1] == cuts[whole].dim:
        raise CutUnknown(f"{node.name} picks parts of what is cut, or of more than one dim")
    index = bound(node)["indices"][found[1]]
    if index in cuts or value_of(index).dtype is torch.bool:
        raise CutUnknown(f"{node.name} picks by value")
    return Step(cuts[whole], (whole,))


ORDERLESS = frozenset({aten.amax.default, aten.amin.default})
SUMMING = frozenset(
    {aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction, aten.var.correction}
)
COMPLEX = frozenset({aten.view_as_complex.default, aten.view_as_real.default, aten._conj.default})

CUT_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(COPY, _one_operand(view_rules.copied)),
    **dict.fromkeys(RESHAPE, _one_operand(view_rules.reshaped)),
    **dict.fromkeys(PERMUTE, _one_operand(view_rules.permuted)),
    **dict.fromkeys({*SLICING, operator.getitem}, _one_operand(view_rules.sliced)),
    **dict.fromkeys(COMPLEX, _one_operand(view_rules.unchanged)),
    **dict.fromkeys(ORDERLESS | SUMMING, _one_operand(_reduced)),
    **dict.fromkeys(SOFTMAX, _one_operand(_normalised)),
    **dict.fromkeys(CONCATENATION, _concatenated),
    **dict.fromkeys({*POINTWISE, aten.copy.default, aten.expand.default}, _aligned),
    aten.slice_scatter.default: _written,
    **dict.fromkeys({aten.mm.default, aten.addmm.default, *BATCHED_MATMUL}, _multiplied),
    aten._int_mm.default: _multiplied,
    aten._scaled_mm.default: _scaled,
    ALL_TO_ALL: _one_operand(view_rules.exchanged),
    aten.constant_pad_nd.default: _one_operand(view_rules.padded),
    aten.index.Tensor: _indexed,
    aten.repeat.default: _one_operand(view_rules.repeated),
}
