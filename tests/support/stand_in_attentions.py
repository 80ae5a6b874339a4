# SPDX-License-Identifier: Apache-2.0
"""Attention ops of libraries that need a GPU, as stand-ins on CPU: the names and schemas are those
of the libraries, and the values those of torch's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers.models.attention_dispatch  # noqa: F401  (defines the op that it brings)
import torch
from torch import Tensor
from torch.nn import functional as F

_FLASH_2 = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt "
    "window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool "
    "return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_FLASH_2_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt "
    "window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? "
    "alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, Tensor? "
    "leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, "
    "Tensor)"
)
_FLASH_3 = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, "
    "Tensor? out_=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
    "cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt? "
    "max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? page_table=None, Tensor? "
    "kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? "
    "v_descale=None, float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, SymInt attention_chunk=0, float softcap=0.0, bool "
    "rotary_interleaved=True, Tensor? scheduler_metadata=None, SymInt num_splits=1, bool? "
    "pack_gqa=None, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_DIFFUSERS_FLASH_3 = (
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False, Tensor? qv=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, SymInt "
    "attention_chunk=0, float softcap=0.0, SymInt num_splits=1, bool? pack_gqa=None, bool "
    "deterministic=False, SymInt sm_margin=0) -> (Tensor, Tensor)"
)
_XFORMERS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
    "seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool "
    "is_causal, SymInt window_left, SymInt window_right, bool return_softmax, Tensor? "
    "block_tables) -> (Tensor, Tensor, Tensor)"
)
_XFORMERS_3 = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? "
    "seqused_k, Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float "
    "softmax_scale, bool is_causal, Tensor? descale_q=None, Tensor? descale_k=None, Tensor? "
    "descale_v=None, Tensor? block_table=None, bool use_kvsplit=False, SymInt window_left=-1, "
    "SymInt window_right=-1) -> (Tensor, Tensor)"
)
_SAGE_3 = "(Tensor q, Tensor k, Tensor v, bool is_causal) -> Tensor"


@dataclass(frozen=True)
class StandIn:
    """One op, and how a library calls it with query, key and value [B, S, H, D]."""

    name: str
    schema: str
    call: Callable[[Any, Tensor, Tensor, Tensor], Any]
    num_results: int = 4
    is_cut_by_heads: bool = True
    is_cut_by_tokens: bool = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        namespace, name = self.name.split("::")
        result = self.call(getattr(getattr(torch.ops, namespace), name), q, k, v)
        output: Tensor = result[0] if self.num_results > 1 else result
        return output.reshape(q.shape)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _flash_2(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return op(q, k, v, 0.0, _scale(q), False, -1, -1, 0.0, None, False)


def _lengths(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def _varlen(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    flat = (x.flatten(0, 1) for x in (q, k, v))
    sizes = (_lengths(q), _lengths(k), q.shape[1], k.shape[1])
    return op(*flat, *sizes, 0.0, _scale(q), False)


def _flash_3(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return op(q, k, v, softmax_scale=_scale(q), causal=False)


def _flash_3_descaled(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Calls the op with a scale for each head, as for numbers of 8 bits."""
    scales = 0.5 + torch.arange(q.shape[2], dtype=q.dtype, device=q.device).expand(q.shape[0], -1)
    return op(q, k, v, q_descale=scales, softmax_scale=_scale(q), causal=False)


def _flash_3_varlen(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return op(*flat, cu_seqlens_q=_lengths(q), cu_seqlens_k=_lengths(k), max_seqlen_q=q.shape[1])


def _xformers(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    sizes = (q.shape[1], k.shape[1])
    return op(q, k, v, None, None, None, *sizes, 0.0, _scale(q), False, -1, -1, False, None)


def _xformers_3(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    sizes = (q.shape[1], k.shape[1])
    return op(q, k, v, None, None, None, None, *sizes, 0.0, _scale(q), False)


def _sage_3(op: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return op(q, k, v, False)


_WHOLE_ROWS: dict[str, Any] = {"is_cut_by_tokens": False}
_CALLS = {
    "": (
        StandIn("flash_attn::_flash_attn_forward", _FLASH_2, _flash_2),
        StandIn("flash_attn::_flash_attn_varlen_forward", _FLASH_2_VARLEN, _varlen, **_WHOLE_ROWS),
        StandIn("_flash_attn_9e27194::_flash_attn_forward", _FLASH_2, _flash_2),
        StandIn("_flash_attn2_cuda_1a2b3c4::_flash_attn_forward", _FLASH_2, _flash_2),
        StandIn("flash_attn_3::_flash_attn_forward", _FLASH_3, _flash_3),
        StandIn("_flash_attn3_cuda_1a2b3c4::_flash_attn_forward", _FLASH_3, _flash_3),
        StandIn("_diffusers_flash_attn_3::_flash_attn_forward", _DIFFUSERS_FLASH_3, _flash_3, 2),
        StandIn("xformers_flash::flash_fwd", _XFORMERS, _xformers, 3),
        StandIn("mslk_flash::flash_fwd", _XFORMERS, _xformers, 3),
        StandIn("xformers_flash3::flash_fwd", _XFORMERS_3, _xformers_3, 2),
        StandIn("cache_dit_sage3_ops::sage3_attention", _SAGE_3, _sage_3, 1, False, **_WHOLE_ROWS),
    ),
    " with scales of heads": (
        StandIn("flash_attn_3::_flash_attn_forward", _FLASH_3, _flash_3_descaled, **_WHOLE_ROWS),
    ),
    " with lengths": (
        StandIn("flash_attn_3::_flash_attn_forward", _FLASH_3, _flash_3_varlen, **_WHOLE_ROWS),
    ),
}
STAND_INS = {f"{item.name}{how}": item for how, items in _CALLS.items() for item in items}
"""Stand-ins by name: ops as shipped, and how they are called otherwise."""


def _compute(item: StandIn) -> Callable[..., Any]:
    names = [part.split("=")[0].split()[-1] for part in item.schema.split(")")[0].split(",")]

    def attend(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        q, k, v = operands = args[:3]
        lengths, scales = given.get("cu_seqlens_q"), given.get("q_descale")
        if lengths is not None:
            operands = [x.unflatten(0, (lengths.numel() - 1, -1)) for x in (q, k, v)]
        if scales is not None:
            operands = [q * scales[:, None, :, None], k, v]
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in operands))
        out = out.transpose(1, 2).contiguous().reshape(q.shape)
        others = [torch.zeros(()) for _ in range(item.num_results - 1)]
        return (out, *others) if others else out

    return attend


def _shapes(num_results: int) -> Callable[..., Any]:
    def fake(q: Tensor, *_: Any, **__: Any) -> Any:
        others = [q.new_empty(()) for _ in range(num_results - 1)]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return (out, *others) if others else out

    return fake


def _define() -> None:
    for item in {item.name: item for item in STAND_INS.values()}.values():
        namespace, name = item.name.split("::")
        if hasattr(getattr(torch.ops, namespace), name):
            torch.library.register_kernel(item.name, "cpu")(_compute(item))
            continue
        torch.library.define(item.name, item.schema)
        torch.library.impl(item.name, "cpu")(_compute(item))
        torch.library.register_fake(item.name)(_shapes(item.num_results))


_define()
