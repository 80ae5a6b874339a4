# SPDX-License-Identifier: Apache-2.0
"""Says, for a result that ranks share out, which operands they would have to share out as well.

The inverse of `cut/rules.py`, from a result back to its operands. It only proposes: whether ranks
can compute their shares from these is what the rules say (`shares.py`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.fx import Node

from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.cut.rules import COMPLEX, CUT_RULES, ORDERLESS, SUMMING, tensor_inputs
from cocodiff_compile.cut.view_rules import (
    reshaped_cut,
    segments_within,
    taken_range,
    written_range,
)
from cocodiff_compile.ir.aten import (
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
    matmul_operands,
    permutation,
    shape_of,
)
from cocodiff_compile.ir.layout import in_order, index_of, same
from cocodiff_compile.ir.parts import kept
from cocodiff_compile.ir.pointwise import POINTWISE

Wanted: TypeAlias = dict[Node, Cut]


def wanted_cuts(node: Node, cut: Cut) -> Wanted:
    """Returns the cuts of the operands of which a share of `node` reads its share. Raises
    CutUnknown if a share of it needs more than that.
    """
    slicing = slicing_of(node)
    if slicing is not None:
        return _of_slice(slicing, node, cut)
    rule = WANTED.get(node.target)
    if rule is None:
        raise CutUnknown(f"{node.target} ({node.name}) has no rule")
    return rule(node, cut)


def slicing_of(node: Node) -> Node | None:
    """Returns the op that takes a part of a tensor, for that part: itself, or a split whose result
    a getitem picks.
    """
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    elif not is_tensor(node):
        return None
    return node if node.target in SLICING else None


def _same_dim(node: Node, cut: Cut) -> Wanted:
    return {node.all_input_nodes[0]: cut}


def _of_complex(node: Node, cut: Cut) -> Wanted:
    operand = node.all_input_nodes[0]
    if cut.dim >= len(shape_of(operand)):
        raise CutUnknown(f"{node.name} parts real from imaginary numbers in what is cut")
    return {operand: cut}


def _of_reshape(node: Node, cut: Cut) -> Wanted:
    operand = node.all_input_nodes[0]
    return {operand: reshaped_cut(cut, shape_of(node), shape_of(operand), node.name)}


def _of_permute(node: Node, cut: Cut) -> Wanted:
    operand = node.all_input_nodes[0]
    return {operand: cut.at(permutation(node, len(shape_of(operand)))[cut.dim])}


def _of_slice(slicing: Node, node: Node, cut: Cut) -> Wanted:
    whole: Node = bound(slicing)["self"]
    shape = shape_of(whole)
    dim = bound(slicing)["dim"] % len(shape)
    if slicing.target in (aten.select.int, aten.unbind.int):
        return {whole: cut.at(cut.dim + (dim <= cut.dim))}
    if dim != cut.dim or same(shape[dim], shape_of(node)[dim]):
        return {whole: cut}
    if not same(cut.outer, 1):
        raise CutUnknown(f"{node.name} takes rows of several blocks")
    begin, end = taken_range(slicing, node)
    around = (begin, *cut.segments, shape[dim] - end)
    return {whole: cut.with_segments([length for length in around if not same(length, 0)])}


def _of_reduction(node: Node, cut: Cut) -> Wanted:
    arguments = bound(node)
    operand = arguments["self"]
    rank = len(shape_of(operand))
    dims = {dim % rank for dim in arguments["dim"] or range(rank)}
    if arguments["keepdim"]:
        return {operand: cut}
    left = [dim for dim in range(rank) if dim not in dims]
    return {operand: cut.at(left[cut.dim])}


def _of_concatenation(node: Node, cut: Cut) -> Wanted:
    dim, tensors = bound(node)["dim"] % len(shape_of(node)), bound(node)["tensors"]
    if node.target is aten.stack.default:
        if dim == cut.dim:
            raise CutUnknown(f"{node.name} stacks what is cut")
        return dict.fromkeys(tensors, cut.at(cut.dim - (dim < cut.dim)))
    if dim != cut.dim:
        return dict.fromkeys(tensors, cut)
    if not same(cut.outer, 1):
        raise CutUnknown(f"{node.name} joins rows of several blocks")
    ends = list(itertools.accumulate(shape_of(item)[dim] for item in tensors))
    bounds = in_order((0, *itertools.accumulate(cut.segments), *ends))
    if bounds is None:
        raise CutUnknown(f"{node.name} joins rows whose order depends on symbolic sizes")
    wanted: Wanted = {}
    for item, begin, end in zip(tensors, (0, *ends), ends, strict=False):
        first, last = index_of(bounds, begin), index_of(bounds, end)
        assert first is not None and last is not None
        inside = bounds[first : last + 1]
        segments = [stop - place for place, stop in itertools.pairwise(inside)]
        if not segments or item in wanted:
            raise CutUnknown(f"{node.name} joins nothing, or the same tensor twice")
        wanted[item] = cut.with_segments(segments)
    return wanted


def _of_aligned(node: Node, cut: Cut) -> Wanted:
    shape = shape_of(node)
    wanted: Wanted = {}
    for item in tensor_inputs(node):
        own = shape_of(item)
        dim = cut.dim - len(shape) + len(own)
        if dim >= 0 and same(own[dim], shape[cut.dim]):
            wanted[item] = cut.at(dim)
    return wanted


def _of_written(node: Node, cut: Cut) -> Wanted:
    arguments = bound(node)
    if arguments["dim"] % len(shape_of(node)) != cut.dim:
        return _of_aligned(node, cut)
    first, last = segments_within(cut, *written_range(node), node)
    return {arguments["self"]: cut, arguments["src"]: cut.with_segments(cut.segments[first:last])}


def _of_matmul(node: Node, cut: Cut) -> Wanted:
    left, right = matmul_operands(node)
    if cut.dim == len(shape_of(node)) - 2:
        return {left: cut}
    if node.target in BATCHED_MATMUL and cut.dim == 0:
        return {item: cut for item in tensor_inputs(node) if len(shape_of(item)) == 3}
    raise CutUnknown(f"{node.name} has columns of {right.name} in what is cut")


def _of_scaled_matmul(node: Node, cut: Cut) -> Wanted:
    arguments = bound(node)
    left, scale = arguments["self"], arguments["scale_a"]
    if cut.dim != 0:
        raise CutUnknown(f"{node.name} has columns in what is cut")
    is_one = all(same(size, 1) for size in shape_of(scale))
    return {left: cut} if is_one else {left: cut, scale: cut}


def _of_repeat(node: Node, cut: Cut) -> Wanted:
    operand = bound(node)["self"]
    dim = cut.dim - len(shape_of(node)) + len(shape_of(operand))
    if dim < 0 or bound(node)["repeats"][cut.dim] != 1:
        raise CutUnknown(f"{node.name} repeats what is cut")
    return {operand: cut.at(dim)}


def _of_index(node: Node, cut: Cut) -> Wanted:
    found = kept(node)
    if found is None or found[1] == cut.dim:
        raise CutUnknown(f"{node.name} picks parts of what is cut, or of more than one dim")
    return {bound(node)["self"]: cut}


WANTED: Mapping[Any, Callable[[Node, Cut], Wanted]] = {
    **dict.fromkeys((*COPY, *SOFTMAX, aten.constant_pad_nd.default), _same_dim),
    **dict.fromkeys(COMPLEX, _of_complex),
    **dict.fromkeys(RESHAPE, _of_reshape),
    **dict.fromkeys(PERMUTE, _of_permute),
    **dict.fromkeys(ORDERLESS | SUMMING, _of_reduction),
    **dict.fromkeys(CONCATENATION, _of_concatenation),
    **dict.fromkeys(
        (*POINTWISE, aten.copy.default, aten.expand.default),
        _of_aligned,
    ),
    aten.slice_scatter.default: _of_written,
    **dict.fromkeys((aten.mm.default, aten.addmm.default, *BATCHED_MATMUL), _of_matmul),
    aten._int_mm.default: _of_matmul,
    aten._scaled_mm.default: _of_scaled_matmul,
    aten.index.Tensor: _of_index,
    aten.repeat.default: _of_repeat,
    operator.getitem: _same_dim,
}
assert WANTED.keys() <= {*CUT_RULES}
