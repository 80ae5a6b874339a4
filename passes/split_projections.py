# SPDX-License-Identifier: Apache-2.0
"""split-projections: give V, Q and K projections of their own where one GEMM makes them together.

Needs     recognised sites.
Rewrites  a GEMM whose columns are cut into roles, and maybe an MLP, before anything else reads
          them: one GEMM per role, and one per run of other columns. Weights are not copied, each
          GEMM reads its columns of the one there is.
Keeps     every value: a column of a product does not depend on the others. Bit for bit where the
          library that multiplies computes a column alike whatever stands beside it, as on CPU.
Declines  nothing. A GEMM that is read as a whole too stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from cocodiff_compile.ir.aten import (
    RESHAPE,
    SLICING,
    aten,
    bound,
    emit,
    is_tensor,
    matmul_operands,
    shape_of,
)
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.ir.layout import same, static_size
from cocodiff_compile.ir.parts import part_of
from cocodiff_compile.ir.records import Recognition, UlyssesSite
from cocodiff_compile.passes.recognize_ulysses import recognize

_GEMMS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class SplitProjections:
    """The pass; it has no options."""

    name: str = "split-projections"

    def run(self, graph: Graph, recognition: Recognition) -> PassResult:
        number = split_projections(graph, recognition)
        if not number:
            return PassResult(changed=False)
        graph.eliminate_dead_code()
        return PassResult(True, recognize(graph), notes=(f"{number} fused projections",))


def fused_projections(recognition: Recognition) -> dict[Node, UlyssesSite]:
    """GEMMs that make V together with something else."""
    return {
        item.node: site
        for site in recognition.sites
        for item in site.v.projections
        if item.is_fused and item.node.target in _GEMMS
    }


def split_projections(graph: Graph, recognition: Recognition) -> int:
    """Splits every fused projection that can be; how many there were."""
    number = 0
    for gemm, site in fused_projections(recognition).items():
        parts = _parts(gemm, site)
        if len(parts) > 1:
            for part in parts:
                _rewrite(graph, gemm, part)
            number += 1
    return number


@dataclass(frozen=True)
class _Columns:
    """A tensor that shows the columns from `begin` to `end` of a GEMM, rows in some shape."""

    node: Node
    begin: int
    end: int


def _parts(gemm: Node, site: UlyssesSite) -> list[list[_Columns]]:
    """The tensors that read a GEMM, by the GEMM each is to get; none if that cannot be told."""
    width = static_size(shape_of(gemm)[-1])
    if width is None:
        return []
    found = sorted(_readers(_Columns(gemm, 0, width)), key=lambda item: item.begin)
    if any(first.end > second.begin for first, second in itertools.pairwise(found)):
        return []
    if any(sum(static_size(size) is None for size in shape_of(item.node)) > 1 for item in found):
        return []
    if gemm.target is aten.addmm.default and not shape_of(bound(gemm)["self"]):
        return []
    roles = {item.columns for leg in site.legs for item in leg.projections if item.node is gemm}
    parts: list[list[_Columns]] = []
    for item in found:
        is_role = (item.begin, item.end) in roles
        joins = parts and not is_role and parts[-1][-1].end == item.begin
        if joins and (parts[-1][-1].begin, parts[-1][-1].end) not in roles:
            parts[-1].append(item)
        else:
            parts.append([item])
    return parts


def _readers(columns: _Columns) -> Iterator[_Columns]:
    """Yields what is read of a GEMM, behind views of rows and cuts of columns."""
    behind = [_behind(columns, user) for user in columns.node.users]
    if not behind or any(item is None for item in behind):
        yield columns
        return
    for item in behind:
        assert item is not None
        yield from _readers(item) if is_tensor(item.node) else _picked(item)


def _behind(columns: _Columns, user: Node) -> _Columns | None:
    """`user` as columns of the same GEMM, None if it is something else."""
    width = columns.end - columns.begin
    if user.target in RESHAPE and same(shape_of(user)[-1], width):
        return _Columns(user, columns.begin, columns.end)
    if user.target not in SLICING:
        return None
    last = len(shape_of(columns.node)) - 1
    if bound(user)["dim"] % (last + 1) != last:
        return None
    if not is_tensor(user):
        return _Columns(user, columns.begin, columns.end)
    return _taken(columns, user)


def _picked(split: _Columns) -> Iterator[_Columns]:
    for user in split.node.users:
        taken = _taken(split, user)
        if taken is not None:
            yield from _readers(taken)


def _taken(columns: _Columns, node: Node) -> _Columns | None:
    part = part_of(node)
    if part is None or static_size(part.start) is None or static_size(part.length) is None:
        return None
    if len(shape_of(node)) != len(shape_of(part.whole)):
        return None
    begin = columns.begin + int(part.start)
    return _Columns(node, begin, begin + int(part.length))


def _rewrite(graph: Graph, gemm: Node, part: Sequence[_Columns]) -> None:
    """A GEMM for the columns of `part`, whose tensors are then parts of its result."""
    begin, end = part[0].begin, part[-1].end
    with graph.inserting_before(gemm):
        left, right = matmul_operands(gemm)
        columns = emit(graph, aten.slice.Tensor, right, 1, begin, end, like=right)
        if gemm.target is aten.addmm.default:
            bias, scales = bound(gemm)["self"], ("beta", "alpha")
            if same(shape_of(bias)[-1], shape_of(right)[-1]):
                bias = emit(graph, aten.slice.Tensor, bias, -1, begin, end, like=gemm)
            scaled = {name: bound(gemm)[name] for name in scales if bound(gemm)[name] != 1}
            apart = emit(graph, aten.addmm.default, bias, left, columns, like=gemm, **scaled)
        else:
            apart = emit(graph, aten.mm.default, left, columns, like=gemm)
        for item in part:
            shown = apart
            if len(part) > 1:
                first = item.begin - begin
                last = first + item.end - item.begin
                shown = emit(graph, aten.slice.Tensor, apart, 1, first, last, like=gemm)
            shape = [-1 if (size := static_size(s)) is None else size for s in shape_of(item.node)]
            if len(shape) != len(shape_of(shown)):
                shown = emit(graph, aten.reshape.default, shown, shape, like=gemm)
            item.node.replace_all_uses_with(shown)
