# SPDX-License-Identifier: Apache-2.0
"""Checks what heads, tokens and selected rows ask for beyond the rules of the table.

Heads keep their number and stay in equal chunks, sizes around them may be symbolic, and a matmul
or an attention computes all rows of fewer heads: every bit stays the same. Tokens have known sizes,
and a matmul or an attention computes fewer rows of one operand: `compiler/exact_rows.py` tries
whether bits stay the same.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from cocodiff_compile.cut.cut import Cut, CutUnknown, Step, numbers, sizes_of
from cocodiff_compile.cut.rules import Cuts, cut_of_operand, step_cut, tensor_inputs
from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    SLICING,
    aten,
    bound,
    is_heavy,
    is_number,
    is_pointwise,
    is_tensor,
    shape_of,
    slice_of,
)
from cocodiff_compile.ir.layout import same, static_size

_NOT_BY_HEADS = frozenset(
    {
        aten.amin.default,
        aten.var.correction,
        aten.var_mean.correction,
        aten.view_as_complex.default,
        aten.view_as_real.default,
        aten._conj.default,
        aten.repeat.default,
        aten.slice_scatter.default,
    }
)
"""Ops of the table that no attention was seen to need between its exchanges."""
_NOT_BY_TOKENS = frozenset({aten.index.Tensor})
"""Ops of the table that no model was seen to need between its attentions."""


def step_heads(node: Node, cuts: Cuts) -> Step:
    """Returns how a node is computed per chunk of heads. Raises CutUnknown if it cannot be."""
    if node.target in _NOT_BY_HEADS:
        raise CutUnknown(f"heads are not followed through {node.target} ({node.name})")
    step = step_equal_chunks(node, cuts)
    for source in step.by_chunk:
        if source not in cuts and (cut := cut_of_operand(node, source, step.cut)):
            refuse_symbolic_blocks(source, cut)
    return step


def step_equal_chunks(node: Node, cuts: Cuts) -> Step:
    """Returns how a node is computed in equal chunks, which hold all heads and nothing else. Raises
    CutUnknown if it cannot be.
    """
    if any(_changes_heads(node, source, cut) for source, cut in cuts.items()):
        raise CutUnknown(f"{node.name} takes some heads, or joins something to them")
    step = step_cut(node, cuts)
    if not cuts.keys() <= {*step.by_chunk} or _computes_fewer_rows(node, step):
        raise CutUnknown(f"{node.name} would read heads as rows")
    return step


def _changes_heads(node: Node, source: Node, cut: Cut) -> bool:
    if node.target not in SLICING and node.target is not aten.cat.default:
        return False
    dim = bound(node)["dim"] % len(shape_of(source))
    part = slice_of(node, None) if node.target in SLICING else None
    is_whole = part is not None and same(part[2], shape_of(source)[dim])
    return dim == cut.dim and not is_whole


def _computes_fewer_rows(node: Node, step: Step) -> bool:
    return is_heavy(node) and any(item not in step.by_chunk for item in tensor_inputs(node))


def refuse_symbolic_blocks(node: Node, cut: Cut) -> None:
    """Raises CutUnknown if both sizes of [outer, elements] are symbolic; one may be."""
    size = shape_of(node)[cut.dim]
    if static_size(cut.outer) is None and static_size(size // cut.outer) is None:
        raise CutUnknown(f"{node.name} has two symbolic sizes around its heads")


def step_tokens(node: Node, cuts: Cuts, exchanges: frozenset[Node]) -> Step:
    """Returns how a node is computed per chunk of tokens. Raises CutUnknown if it cannot be; an
    exchange can if it is one of `exchanges`.
    """
    if node.target is ALL_TO_ALL and node not in exchanges:
        raise CutUnknown(f"{node.name} is no exchange of a Ulysses attention")
    if node.target in _NOT_BY_TOKENS:
        raise CutUnknown(f"tokens are not followed through {node.target} ({node.name})")
    for item in (node, *node.all_input_nodes):
        if is_tensor(item):
            sizes_of(item)
        elif is_number(item) and not is_pointwise(node) and not is_heavy(node):
            raise CutUnknown(f"{node.name} has a symbolic size")
    step = step_cut(node, cuts)
    if is_heavy(node) and not _computes_fewer_rows(node, step):
        raise CutUnknown(f"{node.name} reads rows of all its operands")
    outer, *lengths = numbers((step.cut.outer, *step.cut.lengths), node)
    return replace(step, cut=replace(step.cut, outer=outer, lengths=tuple(lengths)))
