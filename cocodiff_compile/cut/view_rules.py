# SPDX-License-Identifier: Apache-2.0
"""The rules for ops that move the elements of one tensor: where its chunks lie behind them.

Each takes the cut of the operand, the operand and the node, and returns the cut of the node. It
raises CutUnknown where a chunk of the result would need more than its chunk of the operand.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from cocodiff_compile.cut.cut import Cut, CutUnknown, numbers, stretch
from cocodiff_compile.ir.aten import (
    SLICING,
    aten,
    bound,
    is_tensor,
    padding_of,
    permutation,
    shape_of,
    slice_of,
)
from cocodiff_compile.ir.layout import Size, divides, index_of, same, static_size

SQUEEZE = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})


def copied(cut: Cut, _operand: Node, _node: Node) -> Cut:
    return cut


def permuted(cut: Cut, operand: Node, node: Node) -> Cut:
    return cut.at(permutation(node, len(shape_of(operand))).index(cut.dim))


def unchanged(cut: Cut, operand: Node, node: Node) -> Cut:
    before, after = shape_of(operand), shape_of(node)
    if cut.dim >= len(after) or not same(before[cut.dim], after[cut.dim]):
        raise CutUnknown(f"{node.target} ({node.name}) changes the dim that is cut")
    return cut


def exchanged(cut: Cut, _operand: Node, node: Node) -> Cut:
    """An exchange cuts dim 0 into a block per rank: chunks must lie inside of those."""
    num_ranks = len(bound(node)["input_split_sizes"])
    if cut.dim == 0 and not divides(num_ranks, cut.outer):
        raise CutUnknown(f"{node.name} sends blocks that are parts of a chunk")
    return cut


def padded(cut: Cut, _operand: Node, node: Node) -> Cut:
    """A pad may drop as many elements in front as it adds behind: sizes tell nothing."""
    if padding_of(node, cut.dim) != (0, 0):
        raise CutUnknown(f"{node.name} moves what is cut")
    return cut


def repeated(cut: Cut, operand: Node, node: Node) -> Cut:
    """A repeat may put dims in front; the dim that is cut must not be repeated itself."""
    dim = cut.dim + len(shape_of(node)) - len(shape_of(operand))
    if bound(node)["repeats"][dim] != 1:
        raise CutUnknown(f"{node.name} repeats what is cut")
    return cut.at(dim)


def reshaped(cut: Cut, operand: Node, node: Node) -> Cut:
    is_symbolic = any(static_size(size) is None for size in shape_of(operand))
    if node.target not in SQUEEZE or not is_symbolic:
        return reshaped_cut(cut, shape_of(operand), shape_of(node), node.name)
    dropped = squeezed_dims(node)
    if cut.dim in dropped:
        raise CutUnknown(f"{node.name} drops the dim that is cut")
    return cut.at(cut.dim - sum(dim < cut.dim for dim in dropped))


def reshaped_cut(cut: Cut, before: Sequence[Size], after: Sequence[Size], name: str) -> Cut:
    """Returns where the same chunks lie after a reshape from `before` to `after`."""
    ahead, ahead_after = _unchanged_ahead(cut.dim, before, after)
    inside = _reshaped_inside(cut.at(cut.dim - ahead), before[ahead:], after[ahead_after:], name)
    return inside.at(inside.dim + ahead_after)


def _unchanged_ahead(dim: int, before: Sequence[Size], after: Sequence[Size]) -> tuple[int, int]:
    """Returns how many dims in front of `dim` a reshape leaves as they are, before and after it;
    dims of one element come and go. What is left of symbolic sizes is easier to divide.
    """
    place = place_after = 0
    while place < dim and place_after < len(after):
        if same(before[place], after[place_after]):
            place, place_after = place + 1, place_after + 1
        elif same(before[place], 1):
            place += 1
        elif same(after[place_after], 1):
            place_after += 1
        else:
            break
    return place, place_after


def _reshaped_inside(cut: Cut, before: Sequence[Size], after: Sequence[Size], name: str) -> Cut:
    blocks = math.prod(before[: cut.dim]) * cut.outer
    least = cut.count if cut.is_equal else 1
    ahead: Size = 1
    scaled = None
    for dim, size in enumerate(after):
        if divides(ahead, blocks) and divides(blocks * least, ahead * size):
            outer = blocks // ahead
            inner = size // outer
            if same(inner, cut.inner):
                return replace(cut, dim=dim, outer=outer)
            if scaled is None and cut.segments:
                scaled = _scaled_shares(replace(cut, dim=dim, outer=outer), inner)
            elif scaled is None and (lengths := _scaled_lengths(cut, inner)):
                scaled = replace(cut, dim=dim, outer=outer, lengths=lengths)
        ahead = ahead * size
    if scaled is None:
        raise CutUnknown(f"{name} joins chunks with what is outside of them, or cuts through them")
    return scaled


def _scaled_lengths(cut: Cut, inner: Size) -> tuple[Size, ...]:
    """Returns the lengths of chunks in blocks of `inner` elements that stand for all of a block;
    none if an element would lie in two chunks. Equal chunks divide `inner`, as was proven before.
    Rows that were selected lie in no larger element.
    """
    if cut.is_equal:
        return (inner // cut.count,) * cut.count
    sizes = [size for size in map(static_size, (inner, *cut.lengths)) if size is not None]
    if len(sizes) <= cut.count or sizes[0] == 1:
        return ()
    scaled = [divmod(length * sizes[0], sum(sizes[1:])) for length in sizes[1:]]
    is_whole = not any(rest for _, rest in scaled) and scaled[0][0] >= cut.selected
    return tuple(length for length, _ in scaled) if is_whole else ()


def _scaled_shares(cut: Cut, inner: Size) -> Cut | None:
    """Returns the shares of blocks of `inner` elements that stand for all of a block; None if a
    share would begin inside of an element.
    """
    sizes = [static_size(size) for size in (inner, cut.inner, *cut.segments)]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    after, before, *segments = known
    scaled = [divmod(length * after, before) for length in segments]
    lengths = [length for length, _ in scaled]
    if any(rest for _, rest in scaled) or any(n % cut.count for n in (*lengths, *segments)):
        return None
    return cut.with_segments(lengths)


def squeezed_dims(node: Node) -> list[int]:
    """Returns the dims that a squeeze drops. From a chunk it may drop no others, though a chunk of
    one element has one more dim of size 1. Raises CutUnknown if symbolic sizes decide.
    """
    shape = shape_of(node.all_input_nodes[0])
    asked = bound(node).get("dim", range(len(shape)))
    asked = [asked] if isinstance(asked, int) else asked
    dims = sorted({dim % len(shape) for dim in asked if same(shape[dim], 1)})
    if len(shape) - len(dims) != len(shape_of(node)):
        raise CutUnknown(f"which dims {node.name} drops depends on symbolic sizes")
    return dims


def sliced(cut: Cut, operand: Node, node: Node) -> Cut:
    """Follows a cut into a part of a dim, one of several parts, or one of several results."""
    slicing = operand if node.target is operator.getitem else node
    if slicing.target not in SLICING or not is_tensor(node):
        return cut  # of several parts the getitem that follows takes one
    dim = bound(slicing)["dim"] % len(shape_of(bound(slicing)["self"]))
    drops_dim = slicing.target in (aten.select.int, aten.unbind.int)
    if dim == cut.dim:
        if drops_dim:
            raise CutUnknown(f"{slicing.name} takes one element of what is cut")
        return _taken(cut, slicing, node)
    return cut.at(cut.dim - 1) if drops_dim and dim < cut.dim else cut


def _taken(cut: Cut, slicing: Node, node: Node) -> Cut:
    """Returns the cut of a part of the dim that is cut: chunks may lose elements."""
    whole = bound(slicing)["self"]
    part = _part(slicing, node)
    if same(part[2], shape_of(whole)[cut.dim]):
        return cut
    if not same(cut.outer, 1) or cut.selected:
        raise CutUnknown(f"{slicing.name} takes rows of several blocks, or of those selected")
    place, stop = taken_range(slicing, node)
    if same(place, stop):
        raise CutUnknown(f"{slicing.name} takes no row")
    if cut.segments:
        first, last = segments_within(cut, place, stop, slicing)
        return cut.with_segments(cut.segments[first:last])
    begin, end = numbers((place, stop), slicing)
    chunks = (stretch(cut, number, whole) for number in range(cut.count))
    return replace(cut, lengths=tuple(max(0, min(end, e) - max(begin, b)) for b, e in chunks))


def segments_within(cut: Cut, begin: Size, end: Size, node: Node) -> tuple[int, int]:
    """Returns the numbers of the first segment of a stretch and of the first one behind it. Raises
    CutUnknown if the stretch begins or ends inside of a segment.
    """
    bounds = [0, *itertools.accumulate(cut.segments)]
    first, last = index_of(bounds, begin), index_of(bounds, end)
    if first is None or last is None:
        raise CutUnknown(f"{node.name} begins or ends inside of what ranks share")
    return first, last


def _part(slicing: Node, node: Node) -> tuple[int, Size, Size]:
    part = slice_of(slicing, node if slicing is not node else None)
    if part is None:
        raise CutUnknown(f"{slicing.name} takes rows that are not known")
    return part


def taken_range(slicing: Node, node: Node) -> tuple[Size, Size]:
    """Returns from where to where a slice, or one result of a split, reaches. Raises CutUnknown if
    that is no stretch.
    """
    _, begin, length = _part(slicing, node)
    return begin, begin + length


def written_range(node: Node) -> tuple[int, int]:
    """Returns from where to where a slice_scatter writes. Raises CutUnknown if it leaves rows out
    between, or if its dim is of unknown length.
    """
    arguments = bound(node)
    dim = arguments["dim"] % len(shape_of(node))
    (size,) = numbers(shape_of(node)[dim : dim + 1], node)
    begin, end, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(size)
    if step != 1 or begin >= end:
        raise CutUnknown(f"{node.name} writes no stretch of rows")
    return begin, end
