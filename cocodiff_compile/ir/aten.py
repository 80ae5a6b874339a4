# SPDX-License-Identifier: Apache-2.0
"""The ATen ops this project reads and writes, by identity; their arguments by name.

Everything else asks `bound`, `slice_of`, `step_layout` and friends for the arguments of an op, and
inserts nodes through `emit`. `attention_ops` says where attentions keep theirs, and `collectives`
reads exchanges.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from cocodiff_compile.compat import is_contiguous_or_false, optimization_hint
from cocodiff_compile.errors import UserError
from cocodiff_compile.ir import layout
from cocodiff_compile.ir.attention_ops import (
    Argument,
    AttentionOp,
    attention_op,
    is_attention,
    is_registered,
)
from cocodiff_compile.ir.layout import Dims, LayoutUnknown, Size
from cocodiff_compile.ir.pointwise import POINTWISE
from cocodiff_compile.ir.sketch import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_TO_ALL = c10d.all_to_all_single.default
ALL_GATHER = c10d.all_gather_into_tensor.default
WAIT = c10d.wait_tensor.default

BATCHED_MATMUL = frozenset({aten.bmm.default, aten.baddbmm.default})
QUANTISED_MATMUL = frozenset({aten._int_mm.default, aten._scaled_mm.default})
PROJECTION = QUANTISED_MATMUL | {aten.mm.default, aten.addmm.default, aten.linear.default}
MATMUL = BATCHED_MATMUL | PROJECTION | {aten.matmul.default, aten.convolution.default}
SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default})

SLICING = frozenset(
    {
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
    }
)

COPY = frozenset(
    {
        aten.clone.default,
        aten.contiguous.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        WAIT,
    }
)
RESHAPE = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)

PERMUTE = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
CONCATENATION = frozenset({aten.cat.default, aten.stack.default})


def bound(node: Node) -> dict[str, Any]:
    """Returns the arguments of an op node by their schema names, defaults included."""
    names = [(arg.name, arg) for arg in node.target._schema.arguments]  # type: ignore[union-attr]
    values = dict(zip((name for name, _ in names), node.args, strict=False))
    for name, argument in names:
        if name not in values:
            values[name] = node.kwargs.get(name, argument.default_value)
    return values


def value_of(node: Node) -> torch.Tensor:
    """Returns the fake tensor a node stands for. Raises TypeError if it stands for none."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"node {node.name} stands for {type(value).__name__}, not for a tensor")
    return value


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def shape_of(node: Node) -> tuple[Size, ...]:
    return tuple(value_of(node).shape)


def size_bytes(node: Node) -> Size:
    """Returns the bytes of the tensor a node stands for."""
    value = value_of(node)
    return value.numel() * value.element_size()


def provenance_of(node: Node) -> dict[str, Any]:
    """Returns where a node comes from, as metadata for another one."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def emit(graph: Graph, target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Node:
    """Inserts a call where the graph inserts, with its value and the provenance of `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = provenance_of(like)
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    mode = value_of(like).fake_mode  # type: ignore[attr-defined]
    with mode:
        node.meta["val"] = (
            graph.called(target, fake_args, fake_kwargs)
            if isinstance(graph, Sketch)
            else target(*fake_args, **fake_kwargs)
        )
    return node


def emit_shape(graph: Graph, source: Node) -> list[int | Node]:
    """Returns the shape of `source` as arguments for a call: numbers, and nodes where symbolic."""
    return [
        size if isinstance(size, int) else emit(graph, aten.sym_size.int, source, dim, like=source)
        for dim, size in enumerate(shape_of(source))
    ]


def emit_contiguous(graph: Graph, source: Node) -> Node:
    """Returns `source` itself if it surely is contiguous, else a copy that is."""
    if is_contiguous_or_false(value_of(source)):
        return source
    return emit(
        graph, aten.clone.default, source, memory_format=torch.contiguous_format, like=source
    )


def is_heavy(node: Node) -> bool:
    """Returns whether a node is a matmul, a convolution or an attention: most of a step."""
    return node.op == "call_function" and (node.target in MATMUL or is_attention(node.target))


def is_softmax(nodes: Sequence[Node]) -> bool:
    """Returns whether the nodes between two matmuls are a softmax, as one op or by exponentials."""
    targets = {node.target for node in nodes}
    return bool(targets & SOFTMAX) or {aten.exp.default, aten.sum.dim_IntList} <= targets


def is_concatenation(node: Node) -> bool:
    return node.target in CONCATENATION


def is_view(node: Node) -> bool:
    """Returns whether a node shows or copies all elements of its only input, in some order."""
    return node.op == "call_function" and node.target in COPY | RESHAPE | PERMUTE


def is_alias_op(target: Any) -> bool:
    """Returns whether an op computes nothing: it shows memory, picks a result, or has no tensor."""
    return target in _ALIASES or bool(getattr(target, "is_view", False))


_ALIASES = (operator.getitem, aten._unsafe_view.default, torch.ops.prim.device.default)


def is_alias(node: Node) -> bool:
    return node.op == "call_function" and is_alias_op(node.target)


def base_of(node: Node) -> Node:
    """Returns the node whose memory this one shows, itself unless it is an alias."""
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node


def readers_of(node: Node) -> Iterator[Node]:
    """Yields the nodes that read a value, or an alias of it."""
    for user in node.users:
        if is_alias(user):
            yield from readers_of(user)
        else:
            yield user


def is_number(node: Node) -> bool:
    """Returns whether a node stands for a size or a scalar, which carries no data of a tensor."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_pointwise(node: Node) -> bool:
    return node.target in POINTWISE


@dataclass(frozen=True)
class FusedAttention:
    """The arguments of an attention op, by role."""

    op: AttentionOp
    query: Node
    key: Node
    value: Node
    mask: Node | None
    is_causal: bool
    has_dropout: bool
    placed_by: tuple[str, ...]
    """The arguments by which the keys that a query sees depend on its place: "causal", a window."""
    per_head: Mapping[Node, int]
    """Other tensors that hold something of each head, each with that dim."""
    shared: tuple[Node, ...]
    """Other tensors that are the same for every head."""
    num_sequences: int = 1
    """How many sequences follow each other in the dim of tokens."""


def attention_operands(node: Node) -> tuple[Node, Node, Node]:
    """Returns query, key and value of an attention op."""
    parsed = parse_fused_attention(node)
    return parsed.query, parsed.key, parsed.value


def parse_fused_attention(node: Node) -> FusedAttention:
    """Returns the arguments of an attention op. Raises UserError if one that was registered has
    another number of dims here.
    """
    op = attention_op(node.target)
    assert op is not None, f"{node.target} is no attention"
    mask, is_causal = _argument(node, op.mask), bool(_argument(node, op.causal))
    others = {name: _argument(node, name) for name in (*op.per_head, *op.shared, *op.lengths)}
    lengths = [others[name] for name in op.lengths if isinstance(others[name], Node)]
    if lengths:
        op = replace(op, layout=op.packed_layout, has_independent_queries=False)
    if is_registered(op):
        _refuse_other_dims(node, op)
    placed_by = [name for name, off in op.by_place.items() if _argument(node, name) != off]
    return FusedAttention(
        op=op,
        query=_argument(node, op.query),
        key=_argument(node, op.key),
        value=_argument(node, op.value),
        mask=mask if isinstance(mask, Node) else None,
        is_causal=is_causal,
        has_dropout=bool(_argument(node, op.dropout)),
        placed_by=("causal", *placed_by) if is_causal else tuple(placed_by),
        per_head={
            others[name]: dim for name, dim in op.per_head.items() if isinstance(others[name], Node)
        },
        shared=tuple(
            others[name] for name in (*op.shared, *op.lengths) if isinstance(others[name], Node)
        ),
        num_sequences=max(1, optimization_hint(shape_of(lengths[0])[0]) - 1) if lengths else 1,
    )


def _refuse_other_dims(node: Node, op: AttentionOp) -> None:
    for name in (op.query, op.key, op.value):
        shape = shape_of(_argument(node, name))
        if len(shape) != op.num_dims:
            raise UserError(
                f"{node.target} is registered with the layout {op.layout!r}, but its argument "
                f"{name!r} ({node.name}) has {len(shape)} dims here: register it with another one"
            )


def _argument(node: Node, where: Argument | None) -> Any:
    if where is None:
        return None
    return node.args[where] if isinstance(where, int) else bound(node)[where]


def added_mask(first: Node, softmax: Sequence[Node]) -> Node | None:
    """Returns what is added to the scores of `first`, or picks from them, before the softmax."""
    if first.target is aten.baddbmm.default and bound(first)["beta"] != 0:
        addend: Node = bound(first)["self"]
        return addend
    masking = (aten.add.Tensor, aten.where.self, aten.masked_fill.Scalar)
    scores = {first, *softmax}
    for node in softmax:
        others = [item for item in node.all_input_nodes if item not in scores and is_tensor(item)]
        wide = [item for item in others if value_of(item).dim() > 0]
        if node.target in masking and wide:
            return wide[0]
    return None


def matmul_operands(node: Node) -> tuple[Node, Node]:
    """Returns both operands of a matmul; for `linear` the right one is the weight as stored."""
    arguments = bound(node)
    if node.target is aten.addmm.default:
        return arguments["mat1"], arguments["mat2"]
    if node.target is aten.baddbmm.default:
        return arguments["batch1"], arguments["batch2"]
    if node.target is aten.linear.default:
        return arguments["input"], arguments["weight"]
    return arguments["self"], arguments["other" if node.target is aten.matmul.default else "mat2"]


def slice_of(node: Node, getitem: Node | None) -> tuple[int, Size, Size] | None:
    """Returns (dim, start, length) of the part that a slicing op takes, None if unknown."""
    arguments = bound(node)
    shape = shape_of(arguments["self"])
    dim = arguments["dim"] % len(shape)
    if node.target is aten.select.int:
        return dim, _from_front(arguments["index"], shape[dim]), 1
    if node.target is aten.slice.Tensor:
        start = arguments["start"] or 0
        if not isinstance(start, int) or arguments["step"] != 1:
            return None
        return dim, _from_front(start, shape[dim]), shape_of(node)[dim]
    if getitem is None:
        return None
    index: int = getitem.args[1]  # type: ignore[assignment]
    if node.target is aten.unbind.int:
        return dim, index, 1
    lengths = [value.shape[dim] for value in node.meta["val"]]
    return dim, sum(lengths[:index]), lengths[index]


def _from_front(place: int, size: Size) -> Size:
    if place >= 0:
        return place
    return max(0, size + place) if isinstance(size, int) else size + place


def step_layout(dims: Dims, operand: Node, node: Node) -> Dims:
    """Returns the layout of `node`, given that of `operand`, one of its inputs.

    Raises `LayoutUnknown` for anything but views, copies, slices, concatenations, repeats and
    pointwise ops that keep the operand's shape.
    """
    target = node.target
    if target in COPY:
        return dims
    if target in RESHAPE:
        return layout.reshape(dims, shape_of(node))
    if target in PERMUTE:
        return layout.permute(dims, permutation(node, len(dims)))
    if target is aten.expand.default:
        return layout.expand(dims, shape_of(node))
    if target in (aten.slice.Tensor, aten.select.int):
        return _step_slice(dims, node, None)
    if target in SLICING:
        return dims  # the getitem that follows picks the part
    if target is operator.getitem:
        return _step_slice(dims, operand, node)
    if is_concatenation(node):
        return _step_concatenation(dims, node)
    if target is aten.constant_pad_nd.default:
        return _step_pad(dims, node)
    if is_pointwise(node) and _same_shape(operand, node):
        return dims
    raise LayoutUnknown(f"{target} ({node.name}) is no view")


def _step_concatenation(dims: Dims, node: Node) -> Dims:
    shape = shape_of(node)
    dim = bound(node)["dim"] % len(shape)
    if node.target is aten.stack.default:
        dims = (*dims[:dim], (), *dims[dim:])
    return layout.concatenate(dims, dim, shape[dim])


def _step_pad(dims: Dims, node: Node) -> Dims:
    """Treats padding as a concatenation, and what is cropped as a slice."""
    for dim, size in enumerate(shape_of(node)):
        before, behind = padding_of(node, dim)
        if isinstance(before, int) and isinstance(behind, int) and before * behind < 0:
            raise LayoutUnknown(f"{node.name} moves dim {dim} by {before} elements")
        if isinstance(before, int) and isinstance(behind, int) and min(before, behind) < 0:
            dims = layout.narrow(dims, dim, -before, size)
        elif not layout.same(size, layout.product(dims[dim])):
            dims = layout.concatenate(dims, dim, size)
    return dims


def padding_of(node: Node, dim: int) -> tuple[Any, Any]:
    """Returns how many elements `constant_pad_nd` adds before and behind a dim; a negative number
    says how many it drops. Symbolic ones are nodes.
    """
    pads = bound(node)["pad"]
    first = 2 * (len(shape_of(node)) - 1 - dim)
    return (pads[first], pads[first + 1]) if first < len(pads) else (0, 0)


def _step_slice(dims: Dims, slicing: Node, getitem: Node | None) -> Dims:
    if slicing.target not in SLICING:
        raise LayoutUnknown(f"{slicing.target} ({slicing.name}) returns a tuple")
    part = slice_of(slicing, getitem)
    if part is None:
        raise LayoutUnknown(f"{slicing.target} ({slicing.name}) takes no consecutive part")
    dim, start, length = part
    narrowed = layout.narrow(dims, dim, start, length)
    drops_dim = slicing.target in (aten.select.int, aten.unbind.int)
    return (*narrowed[:dim], *narrowed[dim + 1 :]) if drops_dim else narrowed


def permutation(node: Node, rank: int) -> list[int]:
    """Returns which dim of its input each dim of a permuting op is."""
    arguments = bound(node)
    if node.target is aten.permute.default:
        return [dim % rank for dim in arguments["dims"]]
    order = list(range(rank))
    first, second = (
        (0, rank - 1) if node.target is aten.t.default else (arguments["dim0"], arguments["dim1"])
    )
    order[first], order[second] = order[second], order[first]
    return order


def _same_shape(left: Node, right: Node) -> bool:
    if not (is_tensor(left) and is_tensor(right)):
        return False
    left_shape, right_shape = shape_of(left), shape_of(right)
    return len(left_shape) == len(right_shape) and all(map(layout.same, left_shape, right_shape))
