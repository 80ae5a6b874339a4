# SPDX-License-Identifier: Apache-2.0
"""Walks over a graph from a node up to the next matmul, attention or collective, within bounds. The
order is breadth-first in graph order, and never depends on a set or a hash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import Node

from cocodiff_compile.ir import layout
from cocodiff_compile.ir.aten import (
    is_concatenation,
    is_heavy,
    is_number,
    shape_of,
    step_layout,
)
from cocodiff_compile.ir.collectives import communicates, is_wait
from cocodiff_compile.ir.layout import RANK, Dims, Factor, LayoutUnknown, Size
from cocodiff_compile.ir.parts import keep_layout, kept, part_of, rejoin_layout, rejoined

MAX_NODES_PER_WALK = 4096
"""Keeps recognition linear in the graph: no attention's surroundings are larger than this."""


def is_barrier(node: Node) -> bool:
    """Returns whether a walk ends here: heavy compute, communication, the graph's borders."""
    return node.op != "call_function" or is_heavy(node) or is_wait(node) or communicates(node)


@dataclass(frozen=True)
class Reached:
    """Holds a barrier and the path between it and the node the walk began at, in the order of the
    data: the barrier is first after a walk back, last after a walk forward.
    """

    barrier: Node
    path: tuple[Node, ...]


def walk_back(begin: Node) -> list[Reached]:
    """Returns the barriers whose data reach `begin`, itself perhaps, each by its shortest path."""
    came_from = _walk([begin], lambda node: node.all_input_nodes)
    return [
        Reached(barrier, tuple(_path_from(barrier, came_from)))
        for barrier in came_from
        if is_barrier(barrier)
    ]


def walk_forward(begin: Node) -> list[Reached]:
    """Returns the barriers, other than `begin`, that its data reach, each by its shortest path."""
    readers = [reader for reader in begin.users if not is_number(reader)]
    came_from = _walk(readers, lambda node: node.users)
    return [
        Reached(barrier, (begin, *reversed(_path_from(barrier, came_from))))
        for barrier in came_from
        if is_barrier(barrier)
    ]


def are_inputs(behind: Iterable[Reached]) -> bool:
    """Returns whether a walk back met inputs only: no matmul, attention or collective."""
    return all(route.barrier.op in ("placeholder", "get_attr") for route in behind)


def between(first: Node, last: Node) -> list[Node]:
    """Returns the nodes through which data of the barrier `first` reach `last`, in graph order."""
    cone = sorted(_walk([last], lambda node: node.all_input_nodes))
    fed = {first}
    for node in cone:
        if not is_barrier(node) and any(before in fed for before in node.all_input_nodes):
            fed.add(node)
    return [node for node in cone if node in fed and node is not first]


def _walk(begin: list[Node], step: Callable[[Node], Iterable[Node]]) -> dict[Node, Node | None]:
    """Returns every node met, barriers included, with the node it was met from."""
    came_from: dict[Node, Node | None] = dict.fromkeys(begin)
    queue = deque(begin)
    while queue and len(came_from) < MAX_NODES_PER_WALK:
        node = queue.popleft()
        if is_barrier(node):
            continue
        for neighbour in step(node):
            if neighbour not in came_from and not is_number(neighbour):
                came_from[neighbour] = node
                queue.append(neighbour)
    return came_from


def _path_from(node: Node, came_from: dict[Node, Node | None]) -> list[Node]:
    """Returns the path from `node` to where the walk began."""
    way = [node]
    while (before := came_from[way[-1]]) is not None:
        way.append(before)
    return way


@dataclass(frozen=True)
class Cut:
    """Describes a slice of a root dim on the path, in that dim's units: [start, start + length)."""

    root_dim: int
    start: Size
    length: Size


@dataclass(frozen=True)
class Narrowed:
    """Describes a step that kept a part of a dim: `factor` is its factor in the layout from there
    on, `whole` the factors of the dim in the tensor `node`, whose layout was `dims`.
    """

    factor: Factor
    whole: tuple[Factor, ...]
    node: Node
    dims: Dims


@dataclass(frozen=True)
class Traced:
    """Holds how far a layout could be followed along a path, and what was cut out on the way."""

    dims: Dims
    node: Node
    cuts: tuple[Cut, ...]
    narrowed: tuple[Narrowed, ...]
    stopped_by: str

    def narrowed_in(self, dim: int) -> list[Narrowed]:
        """Returns the steps that kept a part of what is now in `dim`."""
        return [step for step in self.narrowed if any(step.factor is f for f in self.dims[dim])]

    def whole(self, dim: int) -> tuple[Factor, ...]:
        """Returns the factors of a dim, as if nothing of it had been dropped."""
        factors = self.dims[dim]
        for step in reversed(self.narrowed):
            parts = [step.whole if factor is step.factor else (factor,) for factor in factors]
            factors = tuple(factor for part in parts for factor in part)
        return factors


def trace(dims: Dims, path: tuple[Node, ...]) -> Traced:
    """Follows a layout from `path[0]`, whose layout is `dims`, as far along `path` as possible."""
    cuts: list[Cut] = []
    narrowed: list[Narrowed] = []
    index = 0
    while index + 1 < len(path):
        before, step = path[index], _length_of_step(path[index : index + 4])
        node = path[index + step]
        try:
            stepped = _step(dims, before, node, step)
        except LayoutUnknown as unknown:
            return Traced(dims, before, tuple(cuts), tuple(narrowed), str(unknown))
        cuts += _cut(dims, node) if step == 1 else []
        narrowed += _narrowed(dims, stepped, node)
        dims = stepped
        index += step
    return Traced(dims, path[-1], tuple(cuts), tuple(narrowed), "")


def _step(dims: Dims, before: Node, node: Node, length: int) -> Dims:
    if _keeps_part_of(node, before):
        return keep_layout(dims, node)
    return rejoin_layout(dims, node) if length > 1 else step_layout(dims, before, node)


def _length_of_step(ahead: tuple[Node, ...]) -> int:
    """Returns how many nodes the next step spans: more than one where parts are joined again."""
    for index, node in enumerate(ahead[2:], start=2):
        if not is_concatenation(node):
            continue
        joined = rejoined(node)
        if (joined is not None and joined[0] is ahead[0]) or _keeps_part_of(node, ahead[0]):
            return index
    return 1


def _keeps_part_of(node: Node, whole: Node) -> bool:
    source = kept(node)
    return source is not None and source[0] is whole


def _narrowed(dims: Dims, stepped: Dims, node: Node) -> list[Narrowed]:
    part = part_of(node)
    source = (part.whole, part.dim) if part is not None else kept(node)
    if source is None or len(dims) != len(stepped):
        return []
    whole, dim = source
    new = stepped[dim]
    if len(new) != 1 or any(new[0] is factor for factor in dims[dim]):
        return []
    return [Narrowed(new[0], dims[dim], whole, dims)]


def trace_root(path: tuple[Node, ...]) -> Traced:
    """Follows the layout of `path[0]`, taken as the root, along `path`."""
    return trace(layout.root_dims(shape_of(path[0])), path)


def _cut(dims: Dims, node: Node) -> list[Cut]:
    part = part_of(node)
    if part is None:
        return []
    dim, start, length = part.dim, part.start, part.length
    if len(dims[dim]) != 1 or layout.same(layout.product(dims[dim]), length):
        return []
    factor = dims[dim][0]
    if factor.source == RANK or not layout.is_outermost(dims, factor):
        return []  # some ranks' rows or a part of every head, say, not a part of the root's columns
    begin = factor.start + start * factor.stride
    return [Cut(factor.source, begin, length * factor.stride)]
