# SPDX-License-Identifier: Apache-2.0
"""Concatenations of parts of one tensor: of all parts, which is a transpose written with lists, or
of some, where padding is dropped.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from cocodiff_compile.compat import statically_known_true
from cocodiff_compile.ir import layout
from cocodiff_compile.ir.aten import SLICING, aten, bound, is_concatenation, shape_of, slice_of
from cocodiff_compile.ir.layout import Dims, LayoutUnknown, Size


@dataclass(frozen=True)
class Part:
    """`length` elements from `start` on of one dim of `whole`."""

    whole: Node
    dim: int
    start: Size
    length: Size


def rejoined(node: Node) -> tuple[Node, int] | None:
    """(tensor, dim) if `node` concatenates all parts of that tensor's dim, in order: a transpose
    written with lists, `cat(x.unbind(0), 1)` or `stack(x.chunk(4, 2))`.
    """
    parts = _parts(node)
    if not parts:
        return None
    place: Size = 0
    for part in parts:
        if not layout.same(part.start, place):
            return None
        place = part.start + part.length
    whole, dim = parts[0].whole, parts[0].dim
    return (whole, dim) if layout.same(place, shape_of(whole)[dim]) else None


def _parts(node: Node) -> list[Part]:
    """Returns what `node` concatenates, if these are parts of the same dim of the same tensor."""
    if not is_concatenation(node):
        return []
    parts = [part_of(item) for item in bound(node)["tensors"]]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({(part.whole, part.dim) for part in found}) != 1:
        return []
    return found


def part_of(node: Node) -> Part | None:
    """The part of a tensor that `node` is, None if it is none or cannot be told."""
    getitem = node if node.target is operator.getitem else None
    slicing = node.all_input_nodes[0] if getitem is not None else node
    if slicing.target not in SLICING or (part := slice_of(slicing, getitem)) is None:
        return None
    return Part(bound(slicing)["self"], *part)


def rejoin_layout(dims: Dims, node: Node) -> Dims:
    """The layout of a concatenation of all parts of the tensor whose layout is `dims`."""
    found = rejoined(node)
    if found is None:
        raise LayoutUnknown(f"{node.name} does not join all parts of one tensor")
    dim, parts = found[1], bound(node)["tensors"]
    outer, inner = layout.cut_front(dims[dim], len(parts))
    to = bound(node)["dim"] % len(shape_of(node))
    keeps_dim = len(shape_of(parts[0])) == len(dims)
    rest = (*dims[:dim], inner, *dims[dim + 1 :]) if keeps_dim else (*dims[:dim], *dims[dim + 1 :])
    if node.target is aten.stack.default:
        return (*rest[:to], outer, *rest[to:])
    return (*rest[:to], outer + rest[to], *rest[to + 1 :])


def is_padding(node: Node) -> bool:
    """Returns whether a node puts something beside the elements of a tensor."""
    if node.target is aten.constant_pad_nd.default:
        return True
    return is_concatenation(node) and rejoined(node) is None


def kept(node: Node) -> tuple[Node, int] | None:
    """(tensor, dim) if `node` keeps some elements of that tensor's dim and drops others: a
    concatenation of slices along the dim they were taken from, or an index.
    """
    if node.target is aten.index.Tensor:
        return _indexed(node)
    parts = _parts(node)
    if not parts or node.target is not aten.cat.default:
        return None
    whole, dim = parts[0].whole, parts[0].dim
    size = shape_of(node)[dim]
    is_smaller = statically_known_true(size < shape_of(whole)[dim])
    return (whole, dim) if is_smaller and bound(node)["dim"] % len(shape_of(node)) == dim else None


def _indexed(node: Node) -> tuple[Node, int] | None:
    """Returns the tensor and the dim of an index with one list of places."""
    arguments = bound(node)
    given = [dim for dim, index in enumerate(arguments["indices"]) if index is not None]
    if len(given) != 1 or len(shape_of(arguments["indices"][given[0]])) != 1:
        return None
    whole: Node = arguments["self"]
    return whole, given[0]


def keep_layout(dims: Dims, node: Node) -> Dims:
    """The layout of a tensor that keeps a part of the one whose layout is `dims`."""
    found = kept(node)
    if found is None:
        raise LayoutUnknown(f"{node.name} does not keep a part of one tensor")
    dim = found[1]
    return layout.narrow(dims, dim, 0, shape_of(node)[dim])
