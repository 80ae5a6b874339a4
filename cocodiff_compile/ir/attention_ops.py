# SPDX-License-Identifier: Apache-2.0
"""The ops that compute an attention by themselves, one record each.

Recognition, cuts, costs and the check of generated code ask `attention_op`. To support another op,
add its entry to `_SHIPPED`, or register it at run time (`register_attention`). Ops of libraries
that need not be installed are known by name and checked against their schema when they are met.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch

from cocodiff_compile.errors import UserError, refuse_unknown

Argument: TypeAlias = "str | int"
"""The name of an argument in the op's schema, or its place where the op has no schema."""
Shape: TypeAlias = "Sequence[int]"

LAYOUTS = ("BHSD", "BSHD", "HSD", "SHD")
"""Orders of the dims of an operand: B samples, H heads, S tokens, D elements of a head."""


def attention_flops(query: Shape, key: Shape, value: Shape) -> float:
    """Returns the FLOPs of both matmuls, for operands [B, H, S, D]."""
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@dataclass(frozen=True)
class AttentionOp:
    """Says where an op keeps what, and what may be done to it. Query, key, value and output have
    the dims that `layout` names.
    """

    name: str
    """The op as torch names it, "namespace::op" or "namespace::op.overload", or the name of a
    higher-order op. A pattern if `is_pattern`.
    """
    query: Argument = "query"
    key: Argument = "key"
    value: Argument = "value"
    mask: Argument | None = None
    """What is added to the scores, or picks from them; it is broadcast to [B, H, queries, keys]."""
    causal: Argument | None = None
    dropout: Argument | None = None
    output: int = 0
    """The place of the output among several results."""
    layout: str = "BHSD"
    per_head: Mapping[str, int] = field(default_factory=dict)
    """Other tensors that hold something of each head, each with that dim. Where keys have fewer
    heads than queries, those of queries count.
    """
    shared: tuple[str, ...] = ()
    """Other tensors that are the same for every head."""
    lengths: tuple[str, ...] = ()
    """Tensors with the lengths of sequences. Where one is given, the tokens of all samples follow
    each other in one dim.
    """
    packed_layout: str = "SHD"
    """The layout where lengths are given."""
    by_place: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by which the keys that a query sees depend on its place, like those of a sliding
    window, each with the value that turns it off.
    """
    harmless: tuple[str, ...] = ()
    """Flags and whole numbers that change neither which keys a query sees nor what a result holds,
    such as hints for a kernel.
    """
    has_independent_heads: bool = True
    """Whether each head of the output depends on the same head of the operands alone."""
    has_independent_queries: bool = True
    """Whether each row of the output depends on one row of the query alone, unless it is causal."""
    flops: Callable[[Shape, Shape, Shape], float] = attention_flops
    """Computes the FLOPs from the shapes [B, H, S, D] of query, key and value."""
    is_pattern: bool = False

    @property
    def head_dim(self) -> int:
        return self.layout.index("H")

    @property
    def token_dim(self) -> int:
        return self.layout.index("S")

    @property
    def size_dim(self) -> int:
        return self.layout.index("D")

    @property
    def num_dims(self) -> int:
        return len(self.layout)

    def as_bhsd(self, shape: Shape) -> Shape:
        """Returns the shape of an operand in the order [B, H, S, D]."""
        batch = shape[self.layout.index("B")] if "B" in self.layout else 1
        return (batch, shape[self.head_dim], shape[self.token_dim], shape[self.size_dim])

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """Returns the arguments of which it is known what their tensors hold."""
        mask = () if self.mask is None else (self.mask,)
        others = (*self.per_head, *self.shared, *self.lengths)
        return (self.query, self.key, self.value, *mask, *others)

    def is_named(self, name: str) -> bool:
        return bool(re.fullmatch(self.name, name)) if self.is_pattern else self.name == name

    def why_misfit(self, target: Any) -> str:
        """Returns why an op with this name is not the one that is meant; nothing if it is."""
        schema = getattr(target, "_schema", None)
        if schema is None:
            return ""
        names = {argument.name for argument in schema.arguments}
        named = (*self.tensors, self.causal, self.dropout, *self.by_place)
        missing = [str(name) for name in named if name is not None and name not in names]
        if missing:
            return f"it has no argument {', '.join(map(repr, missing))}: its schema is {schema}"
        if schema.is_mutable:
            return f"it writes to its arguments: its schema is {schema}"
        if self.name.startswith("aten::"):
            return ""  # torch's own are tested with each version
        known = {*named, *self.harmless}
        kinds = ("bool", "int", "SymInt")
        unknown = [
            argument.name
            for argument in schema.arguments
            if str(argument.type).removeprefix("Optional[").rstrip("]") in kinds
            and argument.name not in known
        ]
        if unknown:
            return (
                f"what its flags and numbers {', '.join(map(repr, unknown))} do is not known: they "
                "belong to 'causal', 'by_place' or 'harmless'"
            )
        return ""


_PACKED_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k")


def _sdpa(name: str, mask: str | None = None) -> AttentionOp:
    return AttentionOp(f"aten::{name}", mask=mask, causal="is_causal", dropout="dropout_p")


_ATEN = (
    _sdpa("scaled_dot_product_attention", "attn_mask"),
    _sdpa("_scaled_dot_product_attention_math", "attn_mask"),
    _sdpa("_scaled_dot_product_flash_attention"),
    _sdpa("_scaled_dot_product_flash_attention_for_cpu", "attn_mask"),
    _sdpa("_scaled_dot_product_efficient_attention", "attn_bias"),
    _sdpa("_scaled_dot_product_cudnn_attention", "attn_bias"),
    _sdpa("_scaled_dot_product_fused_attention_overrideable", "attn_bias"),
    AttentionOp(
        "aten::_flash_attention_forward",
        causal="is_causal",
        dropout="dropout_p",
        layout="BSHD",
        per_head={"alibi_slopes": -1},
        lengths=("cum_seq_q", "cum_seq_k"),
        shared=("seqused_k",),
        by_place={"window_size_left": None, "window_size_right": None, "alibi_slopes": None},
    ),
    AttentionOp(
        "aten::_efficient_attention_forward",
        mask="bias",
        dropout="dropout_p",
        layout="BSHD",
        lengths=_PACKED_LENGTHS,
        packed_layout="BSHD",
        shared=("seqlen_k",),
        by_place={"custom_mask_type": 0, "window_size": None},
    ),
    # Its score_mod and block_mask may read the index of a head or of a token.
    AttentionOp(
        "flex_attention",
        query=0,
        key=1,
        value=2,
        has_independent_heads=False,
        has_independent_queries=False,
    ),
)

_HUB_BUILD = r"(_[a-z]+)?_[0-9a-z]+(_dirty)?"
"""The end of a namespace of the `kernels` hub: the kind of device, in newer ones, and the build."""

_LONGEST = ("max_seqlen_q", "max_seqlen_k")
_FLASH_3_HINTS = ("num_splits", "pack_gqa", "sm_margin")
_FLASH: dict[str, Any] = {"query": "q", "key": "k", "value": "v", "causal": "causal"}
_FLASH_2: dict[str, Any] = {
    **_FLASH,
    "dropout": "dropout_p",
    "per_head": {"alibi_slopes": -1},
    "by_place": {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None},
    "harmless": (*_LONGEST, "return_softmax", "zero_tensors"),
}
_DESCALES = {"q_descale": 1, "k_descale": 1, "v_descale": 1}
_FLASH_3: dict[str, Any] = {
    **_FLASH,
    "layout": "BSHD",
    "per_head": _DESCALES,
    "lengths": _PACKED_LENGTHS,
    "shared": ("seqused_q", "seqused_k"),
    "by_place": {"window_size_left": -1, "window_size_right": -1, "attention_chunk": 0},
    "harmless": (*_LONGEST, "rotary_interleaved", *_FLASH_3_HINTS),
}
_XFORMERS: dict[str, Any] = {
    "causal": "is_causal",
    "dropout": "p",
    "layout": "BSHD",
    "lengths": _PACKED_LENGTHS,
    "by_place": {"window_left": -1, "window_right": -1},
    "harmless": (*_LONGEST, "return_softmax", "use_kvsplit"),
}


def _flash_2_ops(name: str, is_pattern: bool = False) -> tuple[AttentionOp, AttentionOp]:
    return (
        AttentionOp(
            f"{name}::_flash_attn_forward", layout="BSHD", is_pattern=is_pattern, **_FLASH_2
        ),
        AttentionOp(
            f"{name}::_flash_attn_varlen_forward",
            layout="SHD",
            lengths=_PACKED_LENGTHS,
            shared=("seqused_k",),
            is_pattern=is_pattern,
            **_FLASH_2,
        ),
    )


_LIBRARIES = (
    *_flash_2_ops("flash_attn"),
    *_flash_2_ops(f"_flash_attn2?{_HUB_BUILD}", is_pattern=True),
    AttentionOp("flash_attn_3::_flash_attn_forward", **_FLASH_3),
    AttentionOp(f"_flash_attn3{_HUB_BUILD}::_flash_attn_forward", is_pattern=True, **_FLASH_3),
    AttentionOp(
        "_diffusers_flash_attn_3::_flash_attn_forward",
        layout="BSHD",
        per_head=_DESCALES,
        by_place={"attention_chunk": 0},
        harmless=("deterministic", *_FLASH_3_HINTS),
        **_FLASH,
    ),
    AttentionOp("(xformers|mslk)_flash::flash_fwd", is_pattern=True, **_XFORMERS),
    AttentionOp(
        "(xformers|mslk)_flash3::flash_fwd",
        is_pattern=True,
        per_head={"descale_q": 1, "descale_k": 1, "descale_v": 1},
        **_XFORMERS,
    ),
    # Scales blocks of tokens together, and attends over heads where these are large.
    AttentionOp(
        "cache_dit_sage3_ops::sage3_attention",
        query="q",
        key="k",
        value="v",
        causal="is_causal",
        layout="BSHD",
        has_independent_heads=False,
        has_independent_queries=False,
    ),
)

_SHIPPED: tuple[AttentionOp, ...] = (*_ATEN, *_LIBRARIES)

_registered: dict[str, AttentionOp] = {}
_found: dict[Any, AttentionOp | None] = {}
"""What was looked up so far; the registry changes seldom, graphs are read often. A change replaces
it, so that an answer from before, on another thread, is not kept.
"""


def attention_op(target: Any) -> AttentionOp | None:
    """Returns the entry of an op; None for one that is not known to be an attention."""
    known = _found
    try:
        return known[target]
    except KeyError:
        return known.setdefault(target, _look_up(target))


def is_attention(target: Any) -> bool:
    return attention_op(target) is not None


def op_name(target: Any) -> str:
    """Returns the name of an op as torch writes it; nothing for a function that is no op."""
    is_op = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    return str(target.name()) if is_op else ""


def _look_up(target: Any) -> AttentionOp | None:
    name = op_name(target)
    if not name:
        return None
    for entry in (*_registered.values(), *_SHIPPED):
        if entry.is_named(name) and not entry.why_misfit(target):
            return entry
    return None


def why_no_attention(target: Any) -> str:
    """Returns why an op with the name of an entry is not taken for it; nothing otherwise."""
    name = op_name(target)
    entries = (entry for entry in (*_registered.values(), *_SHIPPED) if entry.is_named(name))
    return next((entry.why_misfit(target) for entry in entries), "")


def is_attention_call(text: str) -> bool:
    """Returns whether an op is an attention, given as generated code writes it: "a.b.default"."""
    try:
        return is_attention(operator.attrgetter(text)(torch.ops))
    except AttributeError:
        return False  # an op that is not loaded


def registry_text() -> str:
    """Returns a text that differs where other ops are registered, or with other fields."""
    return "; ".join(sorted(map(_text, _registered.values()))) or "none"


def _text(entry: AttentionOp) -> str:
    values = {item.name: getattr(entry, item.name) for item in fields(entry)}
    values["flops"] = f"{entry.flops.__module__}.{entry.flops.__qualname__}"
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def register_attention(op: Any, **entry: Any) -> None:
    """Makes an op known as an attention, so that passes find the exchanges around it.

    `op` is an op of torch.library: `torch.ops.mine.attend`, or what `torch.library.custom_op`
    returned. `entry` are fields of `AttentionOp`: which arguments are query, key, value and mask,
    the layout, what else it takes and promises. Raises UserError where they do not fit the op.
    Register it on every rank, before the model is compiled.

        register_attention(torch.ops.mine.attend, query="q", key="k", value="v", layout="BSHD")
    """
    target = _overload(op)
    given = [field for field in fields(AttentionOp) if field.name not in ("name", "is_pattern")]
    refuse_unknown(entry, given, f"register_attention: unknown field {{}} for {target}")
    made = AttentionOp(op_name(target), **copy.deepcopy(entry))
    if reason := _why_refused(made, target):
        raise UserError(f"register_attention: {target}: {reason}")
    _change(made.name, made)


def unregister_attention(op: Any) -> None:
    """Takes back `register_attention`; an op that ships with the project is known again as such."""
    _change(op_name(_overload(op)), None)


def is_registered(entry: AttentionOp) -> bool:
    return entry.name in _registered


def _change(name: str, entry: AttentionOp | None) -> None:
    global _found  # noqa: PLW0603
    if entry is None:
        _registered.pop(name, None)
    else:
        _registered[name] = entry
    _found = {}


def _overload(op: Any) -> torch._ops.OpOverload:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads: list[str] = op.overloads()  # type: ignore[no-untyped-call]
        if "default" not in overloads:
            names = ", ".join(f"{op}.{name}" for name in overloads)
            raise UserError(f"{op} has several overloads, none of them the default: give {names}")
        op = op.default
    if not isinstance(op, torch._ops.OpOverload):
        raise UserError(
            f"{op!r} is {type(op).__name__}, no attention op; allowed: an op of torch.library, "
            "such as torch.ops.mine.attend: graphs show no others"
        )
    return op


_KINDS = {
    Mapping: "a dict with names of arguments as keys",
    tuple: "a tuple of names of arguments",
    int: "a whole number",
}
_FIELD_KINDS = {
    "per_head": Mapping,
    "by_place": Mapping,
    **dict.fromkeys(("shared", "lengths", "harmless"), tuple),
    "output": int,
}


def _why_refused(entry: AttentionOp, target: torch._ops.OpOverload) -> str:
    for name, kind in _FIELD_KINDS.items():
        if not isinstance(getattr(entry, name), kind):
            return f"{name!r} is {getattr(entry, name)!r}; allowed: {_KINDS[kind]}"
    for name in ("layout", "packed_layout"):
        if getattr(entry, name) not in LAYOUTS:
            allowed = ", ".join(map(repr, LAYOUTS))
            return f"{name!r} is {getattr(entry, name)!r}; allowed: {allowed}"
    if reason := entry.why_misfit(target):
        return reason
    if not 0 <= entry.output < len(target._schema.returns):
        return f"'output' is {entry.output}; it has {len(target._schema.returns)} results"
    if torch.Tag.nondeterministic_seeded in target.tags and entry.dropout is None:
        return "it draws random numbers: give 'dropout', the argument that says how many"
    unknown = [
        argument.name
        for argument in target._schema.arguments
        if "Tensor" in str(argument.type) and argument.name not in entry.tensors
    ]
    if unknown:
        return (
            f"what its tensors {', '.join(map(repr, unknown))} hold is not known: give them as "
            "'mask', 'per_head', 'shared' or 'lengths'"
        )
    return ""
