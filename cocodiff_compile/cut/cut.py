# SPDX-License-Identifier: Apache-2.0
"""Describes how a tensor is cut into chunks along one of its dims.

A `Cut` says that a dim is [outer, elements], and that the elements of each of the `outer` blocks
are cut into chunks of the same `lengths`. Sizes may be symbolic. A length is 0 where a tensor has
nothing of a chunk: the text of a joint sequence may lie in the first chunk as a whole. Rows that
were `selected` are the first of two chunks, of which only that one is computed.

    heads    [B, S, H, D], to be exchanged over P ranks     dim 2, outer P, (h/2, h/2)
             [P*S*B*h*D]                                    dim 0, outer P*S*B, (h/2*D, h/2*D)
    tokens   [B*S, C], as a matmul reads them               dim 0, outer B, (a, S - a)
             [B, h, P*S, D], tokens of all ranks            dim 2, outer P, (a, S - a)

Chunks may also be the shares of ranks. A share holds a part of every one of the `segments` of a
block, such as text and image of a joint sequence; segments that do not divide are padded, so that
all shares have the same length. A symbolic segment must provably divide.

    shares   [B, T + S, C] on P ranks                       dim 1, outer 1, segments (T, S)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from cocodiff_compile.ir.aten import shape_of
from cocodiff_compile.ir.layout import Size, divides, same, static_size


class CutUnknown(Exception):
    """A cut cannot be followed through a step; the message says which and why."""


@dataclass(frozen=True)
class Cut:
    dim: int
    outer: Size
    lengths: tuple[Size, ...]
    selected: int = 0
    """How many rows from anywhere the first chunk holds, in their order; 0 for stretches."""
    segments: tuple[Size, ...] = ()
    """The lengths that are shared out one by one where chunks are the shares of ranks."""

    @classmethod
    def in_equal_chunks(cls, dim: int, outer: Size, size: Size, count: int) -> Cut:
        """Returns the cut of a dim of `size` elements into `count` chunks of equal lengths."""
        return cls(dim, outer, (size // outer // count,) * count)

    @classmethod
    def over_ranks(cls, dim: int, outer: Size, segments: Sequence[Size], num_ranks: int) -> Cut:
        """Returns the cut of every segment of each block into as many shares as there are ranks.
        Raises CutUnknown if a symbolic segment may not divide.
        """
        share = sum(_piece(length, num_ranks) for length in segments)
        return cls(dim, outer, (share,) * num_ranks, segments=tuple(segments))

    def with_segments(self, segments: Sequence[Size]) -> Cut:
        return Cut.over_ranks(self.dim, self.outer, segments, self.count)

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def inner(self) -> Size:
        """Returns how many elements a block has, without padding."""
        lengths = self.segments or self.lengths
        return sum(lengths[1:], lengths[0])

    @property
    def pieces(self) -> tuple[Size, ...]:
        """Returns how much of each segment a share holds, padding included."""
        return tuple(_piece(length, self.count) for length in self.segments)

    @property
    def is_equal(self) -> bool:
        """Returns whether all chunks are stretches of provably equal lengths."""
        if self.selected or self.segments:
            return False
        return all(same(item, self.lengths[0]) for item in self.lengths)

    def is_like(self, other: Cut) -> bool:
        """Returns whether chunks lie in the same places, for tensors of the same size in the dim;
        equal chunks of different sizes count as alike.
        """
        mine = (self.dim, self.count, self.selected, len(self.segments))
        if mine != (other.dim, other.count, other.selected, len(other.segments)):
            return False
        if not all(map(same, self.segments, other.segments)):
            return False
        is_equal = self.is_equal and other.is_equal
        return same(self.outer, other.outer) and (
            is_equal or all(map(same, self.lengths, other.lengths))
        )

    def at(self, dim: int) -> Cut:
        return replace(self, dim=dim)


def _piece(length: Size, num_ranks: int) -> Size:
    if isinstance(length, int):
        return -(-length // num_ranks)
    if not divides(num_ranks, length):
        raise CutUnknown(f"{length} tokens may not divide by {num_ranks} ranks")
    piece: torch.SymInt = length // num_ranks
    return piece


@dataclass(frozen=True)
class Step:
    """Says how a node is computed chunk by chunk: the cut of its result, and the inputs of which
    each chunk reads its own chunk. It reads its other inputs as a whole.
    """

    cut: Cut
    by_chunk: tuple[Node, ...]


@dataclass(frozen=True)
class CutPlan:
    """The nodes of a graph that are computed chunk by chunk, each with its step."""

    steps: Mapping[Node, Step]
    count: int
    stopped: Mapping[Node, str]
    """The nodes that read something cut but cannot be cut themselves, each with the reason."""


def numbers(sizes: Iterable[Size], node: Node) -> tuple[int, ...]:
    """Returns sizes of a node as numbers. Raises CutUnknown if one of them is symbolic."""
    found = [static_size(size) for size in sizes]
    if None in found:
        raise CutUnknown(f"{node.name} has a symbolic size")
    return tuple(size for size in found if size is not None)


def sizes_of(node: Node) -> tuple[int, ...]:
    """Returns the shape of a node. Raises CutUnknown if a size of it is symbolic."""
    return numbers(shape_of(node), node)


def stretch(cut: Cut, number: int, node: Node) -> tuple[int, int]:
    """Returns where a chunk begins and ends in its block. Raises CutUnknown if it is symbolic."""
    lengths = numbers(cut.lengths, node)
    begin = sum(lengths[:number])
    return begin, begin + lengths[number]
