"""Where groups of heads lie in a tensor, followed through an attention and what is around it.

A `HeadCut` says that a dim is [outer, heads and what is inside of them]; chunk c of n is the c-th
of n equal parts of the latter, in each of the `outer` blocks. `HEAD_RULES` says for each op where
the heads of its result lie; heads are not followed through an op that is not listed there.

    [B, S, H, D], to be exchanged over P ranks     dim 2, outer P: each rank's heads
    [B, S, P, h, D]                                dim 3, outer 1
    [P*S*B*h*D]                                    dim 0, outer P*S*B
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    BATCHED_MATMUL,
    CONCATENATION,
    COPY,
    PERMUTE,
    RESHAPE,
    SLICING,
    SOFTMAX,
    aten,
    bound,
    is_tensor,
    padding_of,
    parse_fused_attention,
    permutation,
    shape_of,
    slice_of,
    value_of,
)
from cocodiff_compile.ir.attention_ops import ATTENTION_OPS, FUSED_ATTENTION
from cocodiff_compile.ir.layout import Size, divides, same
from cocodiff_compile.ir.parts import kept
from cocodiff_compile.ir.pointwise import POINTWISE


class CutUnknown(Exception):
    """Heads cannot be followed through a step; the message says which and why."""


@dataclass(frozen=True)
class HeadCut:
    dim: int
    outer: Size


def step_cut(cut: HeadCut, operand: Node, node: Node, count: int) -> HeadCut:
    """Returns the cut of `node`, given that of `operand`, one of its inputs."""
    rule = HEAD_RULES.get(node.target)
    if rule is None:
        raise CutUnknown(f"{node.target} ({node.name}) may mix heads")
    if is_tensor(node) and any(same(size, 0) for size in shape_of(node)):
        raise CutUnknown(f"{node.name} has no element")
    return rule(HeadStep(cut, operand, node, count))


@dataclass(frozen=True)
class HeadStep:
    """A step from `operand`, whose heads are cut into `count` chunks, to `node`, which reads it."""

    cut: HeadCut
    operand: Node
    node: Node
    count: int


def _copied(step: HeadStep) -> HeadCut:
    return step.cut


def _exchanged(step: HeadStep) -> HeadCut:
    """An exchange cuts dim 0 into a block per rank: chunks must lie inside of those."""
    if step.cut.dim == 0:
        num_ranks = len(bound(step.node)["input_split_sizes"])
        if not divides(num_ranks, step.cut.outer):
            raise CutUnknown(f"{step.node.name} sends blocks that are parts of a chunk of heads")
    return step.cut


def _reshaped(step: HeadStep) -> HeadCut:
    cut, before, after = step.cut, shape_of(step.operand), shape_of(step.node)
    blocks = math.prod(before[: cut.dim]) * cut.outer
    ahead: Size = 1
    for dim, size in enumerate(after):
        if divides(ahead, blocks) and divides(blocks * step.count, ahead * size):
            return HeadCut(dim, blocks // ahead)
        ahead = ahead * size
    raise CutUnknown(
        f"{step.node.name} joins heads with what is outside of them, or cuts through them"
    )


def _squeezed(step: HeadStep) -> HeadCut:
    return HeadCut(
        step.cut.dim - sum(d < step.cut.dim for d in squeezed(step.node)), step.cut.outer
    )


def squeezed(node: Node) -> list[int]:
    """Returns the dims that a squeeze drops. From a chunk it may drop no others, though a chunk of
    one head has one more dim of size 1.
    """
    shape = shape_of(node.all_input_nodes[0])
    asked = bound(node).get("dim", range(len(shape)))
    asked = [asked] if isinstance(asked, int) else asked
    dims = sorted({dim % len(shape) for dim in asked if same(shape[dim], 1)})
    if len(shape) - len(dims) != len(shape_of(node)):
        raise CutUnknown(f"which dims {node.name} drops depends on symbolic sizes")
    return dims


def _permuted(step: HeadStep) -> HeadCut:
    order = permutation(step.node, len(shape_of(step.operand)))
    return HeadCut(order.index(step.cut.dim), step.cut.outer)


def _multiplied(step: HeadStep) -> HeadCut:
    return _at(step, 0, 3)


def _attended(step: HeadStep) -> HeadCut:
    op = ATTENTION_OPS[step.node.target]
    if not op.has_independent_heads:
        raise CutUnknown(f"{step.node.name} may look at the places of its heads")
    if parse_fused_attention(step.node).has_dropout:
        raise CutUnknown(f"{step.node.name} draws random numbers")
    return _at(step, op.head_dim, op.num_dims)


def _at(step: HeadStep, dim: int, rank: int) -> HeadCut:
    """The heads stay in `dim`, which they must have in an operand of `rank` dims: in one of fewer,
    which is broadcast, it would be another.
    """
    if step.cut.dim != dim or len(shape_of(step.operand)) != rank:
        raise CutUnknown(
            f"{step.node.name} has heads in dim {step.cut.dim} of an operand of "
            f"{len(shape_of(step.operand))} dims, not in dim {dim} of {rank}"
        )
    return step.cut


def _sliced(step: HeadStep) -> HeadCut:
    """A part of a dim, or several parts, of which a `getitem` picks one."""
    cut, node = step.cut, step.node
    dim = bound(node)["dim"] % len(shape_of(step.operand))
    if dim == cut.dim:
        part = slice_of(node, None)
        if part is None or not same(part[2], shape_of(step.operand)[dim]):
            raise CutUnknown(f"{node.name} takes some heads, or parts of them")
    drops_dim = node.target is aten.select.int and dim < cut.dim
    return HeadCut(cut.dim - 1, cut.outer) if drops_dim else cut


def _picked(step: HeadStep) -> HeadCut:
    """One of several results: of a split, or the output of an attention."""
    cut, operand = step.cut, step.operand
    if operand.target in SLICING:
        dim = bound(operand)["dim"] % len(shape_of(bound(operand)["self"]))
        drops_dim = operand.target is aten.unbind.int and dim < cut.dim
        return HeadCut(cut.dim - 1, cut.outer) if drops_dim else cut
    if step.node.args[1] != 0:
        raise CutUnknown(f"{step.node.name} is another result of {operand.name} than its output")
    return cut


def _concatenated(step: HeadStep) -> HeadCut:
    cut, node = step.cut, step.node
    dim = bound(node)["dim"] % len(shape_of(node))
    if node.target is aten.stack.default:
        return HeadCut(cut.dim + 1, cut.outer) if dim <= cut.dim else cut
    if dim == cut.dim:
        raise CutUnknown(f"{node.name} joins something to the heads")
    return cut


def _aligned(step: HeadStep) -> HeadCut:
    """Shapes are aligned at their last dims."""
    cut, before, after = step.cut, shape_of(step.operand), shape_of(step.node)
    shifted = HeadCut(cut.dim + len(after) - len(before), cut.outer)
    if not same(after[shifted.dim], before[cut.dim]):
        raise CutUnknown(f"{step.node.name} repeats what holds the heads")
    return shifted


def _reduced(step: HeadStep) -> HeadCut:
    dims = reduced_dims(step.node)
    if step.cut.dim in dims:
        raise CutUnknown(f"{step.node.name} reduces over the heads")
    refuse_other_order(step.node, step.cut.dim, dims)
    dropped = 0 if bound(step.node)["keepdim"] else sum(dim < step.cut.dim for dim in dims)
    return HeadCut(step.cut.dim - dropped, step.cut.outer)


def reduced_dims(node: Node) -> set[int]:
    """Returns the dims over which a reduction runs."""
    arguments = bound(node)
    rank = len(shape_of(arguments["self"]))
    return {dim % rank for dim in arguments["dim"] or range(rank)}


def refuse_other_order(node: Node, cut_dim: int, dims: Collection[int]) -> None:
    """A sum whose terms lie further apart in memory than what is cut runs over columns, and kernels
    sum as many columns at a time as there are: fewer of them may give other bits.
    """
    if node.target in _ORDERLESS:
        return
    value = value_of(bound(node)["self"])
    strides = [optimization_hint(stride) for stride in value.stride()]
    for dim in dims:
        if strides[dim] > strides[cut_dim] and not same(value.shape[dim], 1):
            raise CutUnknown(f"{node.name} sums in an order that depends on what lies beside")


def refuse_inner_cut(node: Node, cut_dim: int, dim: int) -> None:
    """Refuses the same of a softmax, which first copies an operand that is not contiguous."""
    if cut_dim > dim:
        raise CutUnknown(f"{node.name} sums in an order that depends on what lies beside")


def _normalised(step: HeadStep) -> HeadCut:
    dim = bound(step.node)["dim"] % len(shape_of(step.node))
    if dim == step.cut.dim:
        raise CutUnknown(f"{step.node.name} is over the heads")
    refuse_inner_cut(step.node, step.cut.dim, dim)
    return step.cut


def _padded(step: HeadStep) -> HeadCut:
    """A pad may drop as many heads in front as it adds behind: sizes tell nothing."""
    if padding_of(step.node, step.cut.dim) != (0, 0):
        raise CutUnknown(f"{step.node.name} moves heads")
    return step.cut


def _indexed(step: HeadStep) -> HeadCut:
    found = kept(step.node)
    if found is None or found[0] is not step.operand or found[1] == step.cut.dim:
        raise CutUnknown(f"{step.node.name} picks heads, or more than one dim")
    index = bound(step.node)["indices"][found[1]]
    if index is step.operand or value_of(index).dtype is torch.bool:
        raise CutUnknown(f"{step.node.name} picks by value")
    return step.cut


_ORDERLESS = frozenset({aten.amax.default, aten.amin.default})
REDUCING = frozenset({aten.amax.default, aten.sum.dim_IntList, aten.mean.dim})
SQUEEZE = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})

HEAD_RULES: Mapping[Any, Callable[[HeadStep], HeadCut]] = {
    **dict.fromkeys(COPY, _copied),
    **dict.fromkeys(RESHAPE - SQUEEZE, _reshaped),
    **dict.fromkeys(SQUEEZE, _squeezed),
    **dict.fromkeys(PERMUTE, _permuted),
    **dict.fromkeys(BATCHED_MATMUL, _multiplied),
    **dict.fromkeys(FUSED_ATTENTION, _attended),
    **dict.fromkeys(SLICING, _sliced),
    **dict.fromkeys(CONCATENATION, _concatenated),
    **dict.fromkeys(POINTWISE, _aligned),
    **dict.fromkeys(REDUCING, _reduced),
    **dict.fromkeys(SOFTMAX, _normalised),
    ALL_TO_ALL: _exchanged,
    operator.getitem: _picked,
    aten.expand.default: _aligned,
    aten.constant_pad_nd.default: _padded,
    aten.index.Tensor: _indexed,
}
