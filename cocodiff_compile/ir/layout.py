# SPDX-License-Identifier: Apache-2.0
"""Follows where every element of a tensor comes from through views, permutes and copies.

A tensor is a list of dims, a dim a list of factors, outermost first. A `Factor` remembers the dim
of the root tensor it was cut from and its stride (in elements of that dim), so that after any chain
of reshapes and permutes one can still say "this is the outer part of the root's dim 2". Sizes may
be symbolic; every comparison must be provable, an unprovable one raises `LayoutUnknown`.

    root [B, S, H, D]             ((B) (S) (H) (D))
    reshape [B, S, P, h, D]       ((B) (S) (P of H, stride h) (h of H, stride 1) (D))
    permute(2, 1, 0, 3, 4)        ((P of H) (S) (B) (h of H) (D))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from cocodiff_compile.compat import optimization_hint, statically_known_true

Size: TypeAlias = "int | torch.SymInt"

RANK = -1
"""`Factor.source` of the dim that an all-to-all adds: which rank the element was received from."""
BROADCAST = -2
"""`Factor.source` of a dim that `expand` or `repeat` made up."""


class LayoutUnknown(Exception):
    """A step cannot be followed; the message says which and why."""


@dataclass(frozen=True)
class Factor:
    """A part of one dim of the root tensor: `size` elements from `start` on, `stride` apart."""

    source: int
    size: Size
    stride: Size = 1
    start: Size = 0


Dims: TypeAlias = "tuple[tuple[Factor, ...], ...]"


def same(left: Size, right: Size) -> bool:
    """Returns whether two sizes are provably equal."""
    return bool(statically_known_true(left == right))


def divides(part: Size, whole: Size) -> bool:
    """Returns whether `part` provably divides `whole`."""
    if same(part, 0):
        return False
    return bool(statically_known_true(whole % part == 0))  # type: ignore[operator]


def static_size(size: Size) -> int | None:
    """Returns the number that a size provably is, None for one that depends on a symbol."""
    if isinstance(size, int):
        return size
    hint: int = optimization_hint(size)
    return hint if same(size, hint) else None


def in_order(sizes: Iterable[Size]) -> list[Size] | None:
    """Returns sizes in ascending order, each once; None if their order cannot be proven."""
    found: list[Size] = []
    for size in sizes:
        place = 0
        while place < len(found) and statically_known_true(found[place] < size):
            place += 1
        if place == len(found) or statically_known_true(size < found[place]):
            found.insert(place, size)
        elif not same(size, found[place]):
            return None
    return found


def index_of(sizes: Sequence[Size], size: Size) -> int | None:
    """Returns the place of a size among others, None if it is provably equal to none of them."""
    return next((place for place, item in enumerate(sizes) if same(item, size)), None)


def product(factors: Sequence[Factor]) -> Size:
    """Number of elements that a run of factors spans."""
    return math.prod(factor.size for factor in factors)


def root_dims(shape: Sequence[Size]) -> Dims:
    """The layout of a tensor that is its own root."""
    return tuple(
        () if same(size, 1) else (Factor(source=dim, size=size),) for dim, size in enumerate(shape)
    )


def reshape(dims: Dims, shape: Sequence[Size]) -> Dims:
    """Cuts and joins factors so that they fill `shape` in row-major order."""
    pending = [factor for dim in reversed(dims) for factor in reversed(dim)]
    reshaped = tuple(_take(pending, size) for size in shape)
    if pending:
        raise LayoutUnknown(f"shape {tuple(shape)} does not hold {dims}")
    return reshaped


def _take(pending: list[Factor], size: Size) -> tuple[Factor, ...]:
    """Pops factors off the end of `pending` until they span `size`; the last may be cut in two."""
    taken: list[Factor] = []
    while not same(size, 1):
        if not pending:
            raise LayoutUnknown(f"no elements left to fill a dim of {size}")
        factor = pending.pop()
        if divides(factor.size, size):
            size = size // factor.size
        elif divides(size, factor.size):
            factor, inner = split_factor(factor, size)
            pending.append(inner)
            size = 1
        else:
            raise LayoutUnknown(f"a dim of {size} cuts across a factor of {factor.size}")
        taken.append(factor)
    return tuple(taken)


def split_factor(factor: Factor, outer_size: Size) -> tuple[Factor, Factor]:
    """Cuts a factor into `outer_size` blocks: (which block, which element of it)."""
    inner_size = factor.size // outer_size
    outer = replace(factor, size=outer_size, stride=factor.stride * inner_size)
    return outer, replace(factor, size=inner_size, start=0)


def cut_front(factors: tuple[Factor, ...], count: Size) -> tuple[tuple[Factor, ...], ...]:
    """A dim as (which of `count` equal blocks, which element of the block)."""
    pending = list(reversed(factors))
    outer = _take(pending, count)
    return outer, tuple(reversed(pending))


def permute(dims: Dims, order: Sequence[int]) -> Dims:
    return tuple(dims[dim] for dim in order)


def narrow(dims: Dims, dim: int, start: Size, size: Size) -> Dims:
    """`size` consecutive elements of one dim; only a dim of one factor stays traceable, and one of
    all ranks' tokens: rows of it, counted over the ranks.
    """
    factors = dims[dim]
    if same(product(factors), size):
        return dims
    if factors and factors[0].source == RANK:
        return (*dims[:dim], (Factor(RANK, size),), *dims[dim + 1 :])
    if len(factors) != 1:
        raise LayoutUnknown(f"a slice of dim {dim} cuts across {factors}")
    factor = factors[0]
    kept = replace(factor, size=size, start=factor.start + start * factor.stride)
    return (*dims[:dim], () if same(size, 1) else (kept,), *dims[dim + 1 :])


def is_outermost(dims: Dims, factor: Factor) -> bool:
    """Returns whether no other part of the same root dim has a larger stride."""
    others = (other for factors in dims for other in factors if other.source == factor.source)
    return all(divides(other.stride, factor.stride) for other in others)


def expand(dims: Dims, shape: Sequence[Size]) -> Dims:
    """Repeats dims of size one; new dims come in front."""
    padded = ((),) * (len(shape) - len(dims)) + dims
    return tuple(
        factors if same(product(factors), size) else (Factor(BROADCAST, size),)
        for factors, size in zip(padded, shape, strict=True)
    )


def concatenate(dims: Dims, dim: int, size: Size) -> Dims:
    """The layout of a concatenation as one of its operands sees it: the joined dim grows."""
    factors = dims[dim]
    if len(factors) > 1:
        raise LayoutUnknown(f"a concatenation along dim {dim} joins onto {factors}")
    source = factors[0].source if factors else BROADCAST
    return (*dims[:dim], (Factor(source, size),), *dims[dim + 1 :])


def exchange(dims: Dims, num_ranks: int) -> tuple[Factor, Dims]:
    """An equal-split all-to-all over dim 0: what it scatters, and the layout of what it returns.

    The outermost `num_ranks` blocks of dim 0 go to one rank each; on return the same place holds
    the rank each block came from.
    """
    if not dims or not dims[0]:
        raise LayoutUnknown("the exchanged tensor has nothing to scatter in dim 0")
    first, *rest = dims[0]
    if same(first.size, num_ranks):
        scattered = first
    elif divides(num_ranks, first.size):
        scattered, inner = split_factor(first, num_ranks)
        rest = [inner, *rest]
    else:
        raise LayoutUnknown(f"{num_ranks} blocks cut across a factor of {first.size} in dim 0")
    received = Factor(RANK, num_ranks)
    return scattered, ((received, *rest), *dims[1:])


def dim_of(dims: Dims, source: int) -> int | None:
    """The dim in which the factors of `source` stand, or None if there are none."""
    for dim, factors in enumerate(dims):
        if any(factor.source == source for factor in factors):
            return dim
    return None
