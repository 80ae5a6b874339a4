"""Where groups of heads lie in a tensor, followed through an attention and what is around it.

A `HeadCut` says that a dim is [outer, heads and what is inside of them]; chunk c of n is the c-th
of n equal parts of the latter, in each of the `outer` blocks.

    [B, S, H, D], to be exchanged over P ranks     dim 2, outer P: each rank's heads
    [B, S, P, h, D]                                dim 3, outer 1
    [P*S*B*h*D]                                    dim 0, outer P*S*B
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from cocodiff_compile.graph.aten import (
    BATCHED_MATMUL,
    COPY,
    FUSED_ATTENTION,
    PERMUTE,
    RESHAPE,
    SLICING,
    SOFTMAX,
    aten,
    bound,
    is_collective,
    is_concatenation,
    is_pointwise,
    is_tensor,
    permutation,
    shape_of,
    slice_of,
)
from cocodiff_compile.graph.layout import Size, divides, same
from cocodiff_compile.graph.parts import kept


class CutUnknown(Exception):
    """Heads cannot be followed through a step; the message says which and why."""


@dataclass(frozen=True)
class HeadCut:
    dim: int
    outer: Size


def step_cut(cut: HeadCut, operand: Node, node: Node, count: int) -> HeadCut:
    """The cut of `node`, given that of `operand`, one of its inputs."""
    target = node.target
    if target in COPY or is_collective(node):
        return _whole_blocks(cut, node)
    if target in RESHAPE:
        return _reshaped(cut, shape_of(operand), shape_of(node), count, node)
    if target in PERMUTE:
        order = permutation(node, len(shape_of(operand)))
        return HeadCut(order.index(cut.dim), cut.outer)
    if target in BATCHED_MATMUL:
        return _at(cut, 0, node)
    if target in FUSED_ATTENTION:
        return _at(cut, 1, node)
    if target in SLICING or target is operator.getitem:
        return _sliced(cut, operand, node)
    if is_concatenation(node):
        return _concatenated(cut, node)
    if is_pointwise(node) or target is aten.expand.default:
        return _aligned(cut, operand, node)
    if target in SOFTMAX or target in _KEEPING or kept(node) is not None:
        return _unchanged(cut, operand, node)
    raise CutUnknown(f"{target} ({node.name}) may mix heads")


_KEEPING = frozenset(
    {
        aten.amax.default,
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.constant_pad_nd.default,
    }
)
"""What may change the sizes of other dims than that of the heads."""


def _whole_blocks(cut: HeadCut, node: Node) -> HeadCut:
    """An exchange cuts dim 0 into a block per rank: chunks must lie inside of those."""
    if is_collective(node) and cut.dim == 0:
        num_ranks = len(bound(node)["input_split_sizes"])
        if not divides(num_ranks, cut.outer):
            raise CutUnknown(f"{node.name} sends blocks that are parts of a chunk of heads")
    return cut


def _reshaped(
    cut: HeadCut, before: Sequence[Size], after: Sequence[Size], count: int, node: Node
) -> HeadCut:
    blocks = math.prod(before[: cut.dim]) * cut.outer
    ahead: Size = 1
    for dim, size in enumerate(after):
        if divides(ahead, blocks) and divides(blocks * count, ahead * size):
            return HeadCut(dim, blocks // ahead)
        ahead = ahead * size
    raise CutUnknown(f"{node.name} joins heads with what is outside of them, or cuts through them")


def _at(cut: HeadCut, dim: int, node: Node) -> HeadCut:
    if cut.dim != dim:
        raise CutUnknown(f"{node.name} has heads in dim {cut.dim} of an operand, not in dim {dim}")
    return cut


def _sliced(cut: HeadCut, operand: Node, node: Node) -> HeadCut:
    if node.target is operator.getitem and operand.target not in SLICING:
        return cut  # one of several results
    slicing = operand if node.target is operator.getitem else node
    dim = bound(slicing)["dim"] % len(shape_of(bound(slicing)["self"]))
    if node.target in SLICING and not is_tensor(node):
        return cut  # the getitem that follows picks the part
    if dim == cut.dim:
        part = slice_of(slicing, node if slicing is operand else None)
        if part is None or not same(part[2], shape_of(bound(slicing)["self"])[dim]):
            raise CutUnknown(f"{slicing.name} takes some heads, or parts of them")
    drops_dim = slicing.target in (aten.select.int, aten.unbind.int)
    return HeadCut(cut.dim - 1, cut.outer) if drops_dim and dim < cut.dim else cut


def _concatenated(cut: HeadCut, node: Node) -> HeadCut:
    dim = bound(node)["dim"] % len(shape_of(node))
    if node.target is aten.stack.default:
        return HeadCut(cut.dim + 1, cut.outer) if dim <= cut.dim else cut
    if dim == cut.dim:
        raise CutUnknown(f"{node.name} joins something to the heads")
    return cut


def _aligned(cut: HeadCut, operand: Node, node: Node) -> HeadCut:
    """Shapes are aligned at their last dims."""
    shifted = HeadCut(cut.dim + len(shape_of(node)) - len(shape_of(operand)), cut.outer)
    if not same(shape_of(node)[shifted.dim], shape_of(operand)[cut.dim]):
        raise CutUnknown(f"{node.name} repeats what holds the heads")
    return shifted


def _unchanged(cut: HeadCut, operand: Node, node: Node) -> HeadCut:
    before, after = shape_of(operand), shape_of(node)
    if len(before) != len(after) or not same(before[cut.dim], after[cut.dim]):
        raise CutUnknown(f"{node.target} ({node.name}) may mix heads")
    if node.target in SOFTMAX and bound(node)["dim"] % len(after) == cut.dim:
        raise CutUnknown(f"{node.name} is over the heads")
    return cut
