# SPDX-License-Identifier: Apache-2.0
"""Random calls of every op that a cut may pass: shapes, dims and the other arguments are drawn."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cocodiff_compile.ir.aten import (
    ALL_TO_ALL,
    CONCATENATION,
    COPY,
    PERMUTE,
    QUANTISED_MATMUL,
    RESHAPE,
    SLICING,
    SOFTMAX,
    WAIT,
)
from cocodiff_compile.ir.pointwise import POINTWISE

aten = torch.ops.aten
prims = torch.ops.prims
Draw = Callable[[Any], Any]

NUM_RANKS = 2
SIZES = (1, 2, 3, 4, 6)


@dataclass(frozen=True)
class OpCall:
    """An op with its arguments; tensors among them are what may be cut."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: int | None = None
    """Which of several results is looked at."""


def tensor(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random data, in a random order in memory: contiguous, permuted, or with gaps between rows."""
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.sampled_from((0, 0, 2)))
    seed = draw(st.integers(0, 1000))
    sizes = [shape[dim] for dim in order]
    if sizes:
        sizes[-1] += gap
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    if sizes:
        values = values[..., : shape[order[-1]]]
    values = values.permute([order.index(dim) for dim in range(len(shape))])
    if dtype is torch.bool:
        return values > 0
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if values.dim() else values)
    return values if dtype is torch.float32 else (values * 8).to(dtype)


def whole_numbers(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Products of these are exact, whichever order a library sums them in."""
    return (tensor(draw, shape) * 4).round()


def a_shape(draw: Draw, least: int = 1, most: int = 4) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from(SIZES), min_size=least, max_size=most)))


def _pointwise(op: Any, draw: Draw) -> OpCall:
    shape, schema = a_shape(draw), op._schema.arguments
    args = [_argument(op, item, shape, draw) for item in schema if not item.kwarg_only]
    kwargs = {
        item.name: "trunc" if item.name == "rounding_mode" else item.default_value
        for item in schema
        if item.kwarg_only and (item.name == "rounding_mode" or item.default_value is not None)
    }
    return OpCall(op, tuple(args), kwargs)


def _argument(op: Any, item: Any, shape: tuple[int, ...], draw: Draw) -> Any:
    kind = str(item.type)
    if "Tensor" in kind:
        return tensor(draw, _own_shape(op, item, shape, draw), _dtype(op, item.name))
    if item.name in ("min", "max", "value", "other", "weight", "exponent", "self"):
        return 2 if "bitwise" in str(op) else 0.5
    if item.default_value is not None:
        return item.default_value
    return None if "Optional" in kind else 0.5


def _own_shape(op: Any, item: Any, shape: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
    """One that broadcasts to the others'."""
    if op.namespace == "prims":
        return shape
    if op is aten.masked_fill.Tensor and item.name == "value":
        return ()
    own = tuple(size if draw(st.booleans()) else 1 for size in shape)
    own = shape if item.name == op._schema.arguments[0].name else own
    return own[draw(st.integers(0, len(own) - 1)) :] if draw(st.booleans()) else own


def _dtype(op: Any, name: str) -> torch.dtype:
    if name in ("mask", "condition"):
        return torch.bool
    if "bitwise" in str(op):
        return torch.int64
    return (
        torch.complex64 if op in (aten.conj_physical.default, aten.angle.default) else torch.float32
    )


def _copied(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    if op is prims.convert_element_type.default:
        return OpCall(op, (x, torch.float64))
    if op is aten._to_copy.default:
        return OpCall(op, (x,), {"dtype": draw(st.sampled_from((torch.bfloat16, torch.float64)))})
    if op is aten.clone.default:
        chosen = draw(st.sampled_from((torch.contiguous_format, torch.preserve_format)))
        return OpCall(op, (x,), {"memory_format": chosen})
    return OpCall(op, (x,))


def _reshaped(op: Any, draw: Draw) -> OpCall:
    shape = a_shape(draw)
    if op is aten.unsqueeze.default:
        return OpCall(op, (tensor(draw, shape), draw(st.integers(-len(shape) - 1, len(shape)))))
    dim = st.integers(-len(shape), len(shape) - 1)
    if op is aten.squeeze.default:
        return OpCall(op, (tensor(draw, shape),))
    if op is aten.squeeze.dim:
        return OpCall(op, (tensor(draw, shape), draw(dim)))
    if op is aten.squeeze.dims:
        dims = draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
        return OpCall(op, (tensor(draw, shape), dims))
    x = tensor(draw, shape).contiguous()
    return OpCall(op, (x, _other_shape(math.prod(shape), draw)))


def _other_shape(numel: int, draw: Draw) -> list[int]:
    sizes: list[int] = []
    while numel > 1 and len(sizes) < 5:
        factor = draw(st.sampled_from([n for n in range(1, numel + 1) if numel % n == 0]))
        sizes.append(factor)
        numel //= factor
    sizes.append(numel)
    if draw(st.booleans()):
        sizes[draw(st.integers(0, len(sizes) - 1))] = -1
    return sizes


def _permuted(op: Any, draw: Draw) -> OpCall:
    shape = a_shape(draw, 2, 2) if op is aten.t.default else a_shape(draw)
    x = tensor(draw, shape)
    if op is aten.t.default:
        return OpCall(op, (x,))
    if op is aten.permute.default:
        return OpCall(op, (x, draw(st.permutations(range(x.dim())))))
    dim = st.integers(-x.dim(), x.dim() - 1)
    return OpCall(op, (x, draw(dim), draw(dim)))


def _sliced(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    dim = draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    named = dim - x.dim() if draw(st.booleans()) else dim
    if op is aten.select.int:
        return OpCall(op, (x, named, draw(st.integers(-size, size - 1))))
    if op is aten.slice.Tensor:
        start = draw(st.sampled_from((None, 0, 1, -size, -1)))
        end = draw(st.sampled_from((None, size, size - 1, -1, 2**62)))
        return OpCall(op, (x, named, start, end, draw(st.sampled_from((1, 1, 2)))))
    if op is aten.unbind.int:
        return OpCall(op, (x, named), result=draw(st.integers(0, size - 1)))
    if op is aten.split.Tensor:
        length = draw(st.integers(1, size))
        return OpCall(op, (x, length, named), result=draw(st.integers(0, -(-size // length) - 1)))
    first = draw(st.integers(0, size))
    lengths = [first, size - first] if draw(st.booleans()) else [size]
    result = draw(st.integers(0, len(lengths) - 1))
    return OpCall(op, (x, lengths, named), result=result)


def _concatenated(op: Any, draw: Draw) -> OpCall:
    shape = a_shape(draw, 1, 3)
    rank = len(shape) + (op is aten.stack.default)
    dim = draw(st.integers(-rank, rank - 1))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        own = list(shape)
        if op is aten.cat.default:
            own[dim] = draw(st.sampled_from(SIZES))
        tensors.append(tensor(draw, tuple(own)))
    if draw(st.integers(0, 5)) == 0:
        tensors.append(tensors[0])
    return OpCall(op, (tensors, dim))


def _reduced(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw, 2))
    least = draw(st.sampled_from((0, 1, 1, 1)))
    dims = draw(st.lists(st.integers(0, x.dim() - 1), unique=True, min_size=least, max_size=2))
    dims = [dim - x.dim() if draw(st.booleans()) else dim for dim in dims]
    keepdim = draw(st.booleans())
    if op in (aten.var_mean.correction, aten.var.correction):
        kwargs = {"correction": 0, "keepdim": keepdim}
        chosen = 0 if op is aten.var.correction else draw(st.integers(0, 1))
        result = None if op is aten.var.correction else chosen
        return OpCall(op, (x, dims or None), kwargs, result=result)
    return OpCall(op, (x, dims, keepdim))


def _normalised(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    args: tuple[Any, ...] = (x, draw(st.integers(-x.dim(), x.dim() - 1)))
    return OpCall(op, (*args, False) if op is aten._softmax.default else args)


def _padded(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    pads = []
    for dim in reversed(range(draw(st.integers(0, x.dim() - 1)), x.dim())):
        before = draw(st.integers(-1, 1))
        behind = draw(st.sampled_from((0, 1, -before)))
        pads += [before, behind] if x.shape[dim] + before + behind > 0 else [0, 0]
    return OpCall(op, (x, pads, 7.0))


def _indexed(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    dim = draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    which = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=size + 1))
    if draw(st.booleans()):
        which = draw(st.permutations(range(size)))
    index = torch.tensor(which)
    if draw(st.integers(0, 4)) == 0:
        index = index[:, None]
    return OpCall(op, (x, [*[None] * dim, index]))


def _expanded(op: Any, draw: Draw) -> OpCall:
    shape = a_shape(draw, 1, 3)
    wanted = [draw(st.sampled_from(SIZES)) if size == 1 else size for size in shape]
    in_front = list(a_shape(draw, 0, 2))
    sizes = [
        -1 if draw(st.booleans()) and wanted[d] == shape[d] else wanted[d]
        for d in range(len(shape))
    ]
    return OpCall(op, (tensor(draw, shape), [*in_front, *sizes]))


def _repeated(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    in_front = draw(st.integers(0, 1))
    repeats = [draw(st.sampled_from((1, 1, 2))) for _ in range(in_front + x.dim())]
    return OpCall(op, (x, repeats))


def _written(op: Any, draw: Draw) -> OpCall:
    x = tensor(draw, a_shape(draw))
    dim = draw(st.integers(0, x.dim() - 1))
    begin = draw(st.integers(0, x.shape[dim] - 1))
    end = draw(st.integers(begin + 1, x.shape[dim]))
    rows = tensor(draw, tuple(end - begin if d == dim else n for d, n in enumerate(x.shape)))
    return OpCall(op, (x, rows, dim, begin, end))


def _overwritten(op: Any, draw: Draw) -> OpCall:
    shape = a_shape(draw)
    own = tuple(draw(st.sampled_from((size, size, 1))) for size in shape)
    return OpCall(op, (tensor(draw, shape), tensor(draw, own)))


def _complex(op: Any, draw: Draw) -> OpCall:
    shape = a_shape(draw, 1, 3)
    if op is aten.view_as_complex.default:
        return OpCall(op, (tensor(draw, (*shape, 2)).contiguous(),))
    return OpCall(op, (tensor(draw, shape, torch.complex64),))


def _multiplied(op: Any, draw: Draw) -> OpCall:
    rows = draw(st.sampled_from(SIZES[1:]))
    inner, columns, batch = (draw(st.sampled_from(SIZES)) for _ in range(3))
    if op in (aten.mm.default, aten.addmm.default):
        pair = whole_numbers(draw, (rows, inner)), whole_numbers(draw, (inner, columns))
    else:
        pair = (
            whole_numbers(draw, (batch, rows, inner)),
            whole_numbers(draw, (batch, inner, columns)),
        )
    if op in (aten.mm.default, aten.bmm.default):
        return OpCall(op, pair)
    wanted = (rows, columns) if op is aten.addmm.default else (batch, rows, columns)
    own = tuple(size if draw(st.booleans()) else 1 for size in wanted)
    own = own[draw(st.sampled_from((0, *[len(own) - 1] * 3))) :]  # mostly as in a projection
    kwargs = {"beta": draw(st.sampled_from((1, 2))), "alpha": draw(st.sampled_from((1, 2)))}
    return OpCall(op, (whole_numbers(draw, own), *pair), kwargs)


def _multiplied_in_8_bits(op: Any, draw: Draw) -> OpCall:
    rows, inner, columns = (16 * draw(st.sampled_from((1, 2, 3))) for _ in range(3))
    pair = whole_numbers(draw, (rows, inner)), whole_numbers(draw, (columns, inner)).t()
    if op is aten._int_mm.default:
        return OpCall(op, tuple(item.to(torch.int8) for item in pair))
    left, right = (item.to(torch.float8_e4m3fn) for item in pair)
    if draw(st.booleans()):
        scales = (torch.ones(()), torch.ones(()))
    else:
        scales = torch.linspace(0.5, 2, rows).view(-1, 1), torch.linspace(1, 3, columns).view(1, -1)
    return OpCall(op, (left, right, *scales), {"out_dtype": torch.bfloat16})


def _attended(op: Any, draw: Draw) -> OpCall:
    batch, heads, size = (draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    queries, keys = (draw(st.sampled_from(SIZES)) for _ in range(2))
    q = tensor(draw, (batch, heads, queries, size)).contiguous()
    k, v = (tensor(draw, (batch, heads, keys, size)).contiguous() for _ in range(2))
    causal = draw(st.booleans())
    mask = None
    if not causal and draw(st.booleans()):
        wanted = (batch, heads, queries, keys)
        own = tuple(n if draw(st.booleans()) else 1 for n in wanted)
        own = own[draw(st.sampled_from((0, 2))) :]
        mask = tensor(draw, own)
    if op is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return OpCall(op, (q, k, v, 0.0, causal), {"attn_mask": mask}, result=0)
    result = 0 if op is aten._scaled_dot_product_attention_math.default else None
    return OpCall(op, (q, k, v, mask, 0.0, causal), result=result)


def _exchanged(op: Any, draw: Draw) -> OpCall:
    shape = list(a_shape(draw, 1, 3))
    shape[0] = NUM_RANKS * draw(st.sampled_from((1, 2, 4)))
    splits = [shape[0] // NUM_RANKS] * NUM_RANKS
    return OpCall(op, (tensor(draw, tuple(shape)).contiguous(), splits, splits, "group"))


ATTENTIONS = (
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""The attentions of ATen that can be called here; the rule is one for all."""

CALLS: dict[Any, Callable[[Any, Draw], OpCall]] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(COPY - {WAIT}, _copied),
    **dict.fromkeys(RESHAPE, _reshaped),
    **dict.fromkeys(PERMUTE, _permuted),
    **dict.fromkeys(SLICING, _sliced),
    **dict.fromkeys(CONCATENATION, _concatenated),
    **dict.fromkeys(SOFTMAX, _normalised),
    **dict.fromkeys(ATTENTIONS, _attended),
    **dict.fromkeys((aten.bmm.default, aten.baddbmm.default), _multiplied),
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _multiplied),
    **dict.fromkeys(QUANTISED_MATMUL, _multiplied_in_8_bits),
    **dict.fromkeys((aten.amax.default, aten.amin.default), _reduced),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), _reduced),
    **dict.fromkeys((aten.var.correction, aten.var_mean.correction), _reduced),
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), _complex),
    aten._conj.default: _complex,
    aten.constant_pad_nd.default: _padded,
    aten.index.Tensor: _indexed,
    aten.expand.default: _expanded,
    aten.repeat.default: _repeated,
    aten.slice_scatter.default: _written,
    aten.copy.default: _overwritten,
    ALL_TO_ALL: _exchanged,
}

WITHOUT_A_CALL = {WAIT, operator.getitem}
"""A wait copies nothing, and picking one of several results is part of the calls that have them."""

FAMILIES: dict[str, frozenset[Any]] = {
    name: frozenset(op for op, made in CALLS.items() if made is maker)
    for name, maker in {
        "pointwise": _pointwise,
        "copies": _copied,
        "reshapes": _reshaped,
        "permutes": _permuted,
        "slices": _sliced,
        "concatenations": _concatenated,
        "softmax": _normalised,
        "attention": _attended,
        "matmuls": _multiplied,
        "matmuls in 8 bits": _multiplied_in_8_bits,
        "reductions": _reduced,
        "complex": _complex,
        "pads": _padded,
        "indices": _indexed,
        "expand": _expanded,
        "repeat": _repeated,
        "writes": _written,
        "exchange": _exchanged,
    }.items()
}

_EXACT = """
    abs neg positive relu sgn sign signbit floor ceil round trunc frac sqrt reciprocal square
    bitwise_not logical_not isfinite isinf isnan isneginf isposinf hardtanh relu6 threshold
    leaky_relu hardshrink softshrink nan_to_num conj_physical add sub mul div eq ne lt le gt ge
    bitwise_and bitwise_or bitwise_xor copysign fmax fmin heaviside logical_and logical_or
    logical_xor maximum minimum nextafter clamp clamp_max clamp_min masked_fill max min where
    rsub complex
"""


def is_exact(op: Any) -> bool:
    """Returns whether every element is the same wherever it lies. Vectorised kernels of the others
    round an element differently where it lies behind the last whole vector of a row of memory.
    """
    if op in POINTWISE:
        return op.overloadpacket.__name__ in _EXACT.split()
    return op not in ATTENTIONS
