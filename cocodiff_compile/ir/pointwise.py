# SPDX-License-Identifier: Apache-2.0
"""The pointwise ops: each element of the result depends on one element of every operand.

They are listed by name. torch's tag `pointwise` is no substitute: `aten.equal`, which returns one
bool, and `aten.rrelu`, which draws random numbers, carry it too.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims

_ONE_OPERAND = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad erf
    erfc erfinv exp exp2 expm1 floor frac isfinite isinf isnan isneginf isposinf log log10 log1p
    log2 logical_not neg positive rad2deg reciprocal relu relu6 round rsqrt sgn sigmoid sign signbit
    silu sin sinc sinh sqrt square tan tanh trunc selu mish hardsigmoid hardswish
"""
_WITH_NUMBERS = """
    celu elu gelu hardshrink hardtanh leaky_relu logit nan_to_num softplus softshrink threshold
"""
_TENSOR_OR_SCALAR = """
    add sub mul div eq ne lt le gt ge fmod remainder bitwise_and bitwise_or bitwise_xor copysign
"""
_TWO_TENSORS = """
    atan2 fmax fmin heaviside hypot logaddexp logaddexp2 logical_and logical_or logical_xor maximum
    minimum nextafter
"""
_BOUNDS = "clamp clamp_max clamp_min"
_PRIMS = "abs bitwise_not exp2 fmax fmin log2 maximum minimum reciprocal rsqrt sign signbit trunc"


def _overloads(names: str, *overloads: str) -> set[OpOverload]:
    return {getattr(getattr(aten, name), item) for name in names.split() for item in overloads}


POINTWISE: frozenset[OpOverload] = frozenset(
    {
        *_overloads(_ONE_OPERAND, "default"),
        *_overloads(_WITH_NUMBERS, "default"),
        *_overloads(_TENSOR_OR_SCALAR, "Tensor", "Scalar"),
        *_overloads(_TWO_TENSORS, "default"),
        *_overloads(_BOUNDS, "default", "Tensor"),
        *(getattr(prims, name).default for name in _PRIMS.split()),
        aten.addcdiv.default,
        aten.addcmul.default,
        aten.complex.default,
        aten.div.Scalar_mode,
        aten.div.Tensor_mode,
        aten.lerp.Scalar,
        aten.lerp.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.max.other,
        aten.min.other,
        aten.polar.default,
        aten.pow.Scalar,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.rsub.Scalar,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.self,
        aten.xlogy.Tensor,
    }
)
