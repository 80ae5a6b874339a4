# SPDX-License-Identifier: Apache-2.0
"""The table of hand-written Ulysses attentions, each with what recognition must say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import hand_written as hw
from tests.support import hand_written_more as more
from tests.support import hand_written_uneven as uneven
from tests.support.hand_written import HEAD_SIZE, HEADS, WIDTH

INNER = HEADS * HEAD_SIZE
SEPARATE = {"q": ("to_q",), "k": ("to_k",), "v": ("to_v",), "o": ("to_out",)}
JOINED = {
    "q": ("to_q", "add_q"),
    "k": ("to_k", "add_k"),
    "v": ("to_v", "add_v"),
    "o": ("to_out", "to_add_out"),
}
THIRDS = {"q": (0, INNER), "k": (INNER, 2 * INNER), "v": (2 * INNER, 3 * INNER)}
THIRDS_BEHIND_MLP = {
    role: (more.MLP_WIDTH + begin, more.MLP_WIDTH + end) for role, (begin, end) in THIRDS.items()
}


@dataclass(frozen=True)
class Idiom:
    """One spelling of Ulysses. Token counts are per rank; `text_tokens` is the second sequence."""

    name: str
    build: Callable[[], nn.Module]
    num_ranks: int = 4
    batch: int = 2
    tokens: int = 5
    text_tokens: int = 0
    text_is_replicated: bool = False
    text_is_context: bool = False
    has_text_angles: bool = False
    has_late_angles: bool = False
    has_mask: bool = False
    has_vector: bool = False
    heads: int = HEADS
    kv_heads: int = HEADS
    padded_tokens: int = 0
    """Tokens per rank in the exchanges, where these are padded."""
    value_size: int = HEAD_SIZE
    dtype: torch.dtype = torch.float32
    form: str = "fused"
    is_causal: bool = False
    carries: Mapping[str, str] = field(
        default_factory=lambda: dict(zip("qkvo", "qkvo", strict=True))
    )
    """The roles that are sent in the exchange of each role."""
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SEPARATE)
    columns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    independent: tuple[str, ...] = ()
    dynamic: bool | None = None

    def __str__(self) -> str:
        return self.name

    def sharded(self) -> tuple[Tensor, ...]:
        """Inputs of the whole sequence, to be cut along dim 1."""
        tokens, text_tokens = self.tokens * self.num_ranks, self.text_tokens * self.num_ranks
        inputs = [self._random(self.batch, tokens, WIDTH)]
        if self.text_tokens and not self.text_is_replicated:
            inputs.append(self._random(self.batch, text_tokens, WIDTH))
        if self.has_text_angles:
            inputs += [self._random(1, count, 1, HEAD_SIZE) for count in (text_tokens, tokens)]
        return tuple(inputs)

    def replicated(self) -> tuple[Tensor, ...]:
        tokens = self.tokens * self.num_ranks
        inputs = []
        if self.text_is_replicated:
            inputs.append(self._random(self.batch, self.text_tokens, WIDTH))
        if self.has_late_angles:
            inputs.append(self._random(1, tokens, 1, HEAD_SIZE))
        if self.has_mask:
            inputs.append(self._random(self.batch, 1, tokens, tokens))
        if self.has_vector:
            inputs.append(self._random(self.batch, WIDTH))
        return tuple(inputs)

    def arguments(self) -> tuple[Tensor, ...]:
        """Returns the arguments that one rank calls its model with."""
        shards = (x.chunk(self.num_ranks, dim=1)[0].contiguous() for x in self.sharded())
        return (*shards, *self.replicated())

    def model(self) -> Any:
        torch.manual_seed(0)
        return self.build().to(self.dtype).eval()

    def heads_of(self, role: str) -> int:
        return self.kv_heads if role in "kv" else self.heads

    def head_size_of(self, role: str) -> int:
        return self.value_size if role in "vo" else HEAD_SIZE

    def tokens_of(self, role: str) -> int:
        """Tokens that a rank puts into the exchange of `role`."""
        if self.padded_tokens:
            return self.padded_tokens
        if self.text_is_context:
            return self.text_tokens if role in "kv" else self.tokens
        return self.tokens + (0 if self.text_is_replicated else self.text_tokens)

    def size_bytes(self, role: str) -> int:
        values = sum(
            self.heads_of(other) * self.tokens_of(other) * self.head_size_of(other)
            for other in self.carries[role]
        )
        return self.batch * values * self.dtype.itemsize

    def _random(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype)


def _packed(*shared: str) -> dict[str, str]:
    return {role: next((roles for roles in shared if role in roles), role) for role in "qkvo"}


_grouped = {"heads": 24, "kv_heads": 8}
_text = {"text_tokens": 3, "projections": JOINED}

_LAYOUTS = [
    Idiom("diffusers", hw.Block),
    Idiom("head first", partial(hw.Block, hw.HEAD_FIRST)),
    Idiom("transposed in place", partial(hw.Block, hw.TRANSPOSED)),
    Idiom("packed by stack", partial(hw.Block, hw.STACKED), carries=_packed("qkv")),
    Idiom("packed by cat of sizes", partial(hw.Block, hw.CONCATENATED), carries=_packed("qkv")),
    Idiom("packed by cat of batches", partial(hw.Block, hw.BATCHED), carries=_packed("qkv")),
    Idiom("key and value packed", partial(hw.Block, hw.QUERY_APART), carries=_packed("kv")),
    Idiom("blocks in lists", partial(hw.Block, hw.CHUNKED)),
    Idiom("head first, one sample", partial(hw.Block, hw.HEAD_FIRST), batch=1),
    Idiom("in place, one sample", partial(hw.Block, hw.TRANSPOSED), batch=1),
    Idiom("stack, one sample", partial(hw.Block, hw.STACKED), batch=1, carries=_packed("qkv")),
    Idiom("one sample", hw.Block, batch=1),
    Idiom("one token", hw.Block, tokens=1),
    Idiom("bf16", hw.Block, dtype=torch.bfloat16),
    Idiom("one head per rank", partial(hw.Block, heads=4), heads=4, kv_heads=4),
    Idiom(
        "one head per rank, head first, one sample",
        partial(hw.Block, hw.HEAD_FIRST, heads=4),
        heads=4,
        kv_heads=4,
        batch=1,
    ),
    Idiom("as many heads per rank as ranks", partial(hw.Block, heads=16), heads=16, kv_heads=16),
    Idiom("as many tokens as ranks", hw.Block, tokens=4),
    Idiom("two ranks", hw.Block, num_ranks=2),
    Idiom("three ranks", partial(hw.Block, hw.TRANSPOSED), num_ranks=3),
    Idiom("twelve ranks", partial(hw.Block, hw.HEAD_FIRST), num_ranks=12),
]

_PROJECTIONS = [
    Idiom(
        "fused projection",
        hw.FusedProjection,
        projections={**dict.fromkeys("qkv", ("to_qkv",)), "o": ("to_out",)},
        columns=THIRDS,
    ),
    Idiom(
        "fused projection exchanged at once",
        partial(hw.FusedAtOnce, hw.AT_ONCE),
        projections={**dict.fromkeys("qkv", ("to_qkv",)), "o": ("to_out",)},
        columns=THIRDS,
        carries=_packed("qkv"),
    ),
    Idiom(
        "fused projection with MLP",
        hw.FusedWithMlp,
        projections={**dict.fromkeys("qkv", ("to_qkv_mlp_proj",)), "o": ("to_out",)},
        columns=THIRDS,
    ),
    Idiom(
        "key is value",
        partial(hw.KeyIsValue, hw.KEY_IS_VALUE),
        projections={**SEPARATE, "v": ("to_k",)},
        carries={"q": "q", "k": "k", "v": "k", "o": "o"},
    ),
    Idiom("joint", hw.Joint, has_text_angles=True, **_text),
    Idiom("joint, head first", partial(hw.Joint, hw.HEAD_FIRST), has_text_angles=True, **_text),
    Idiom(
        "joint, packed by stack",
        partial(hw.Joint, hw.STACKED),
        has_text_angles=True,
        carries=_packed("qkv"),
        **_text,
    ),
    Idiom("replicated text", hw.ReplicatedText, text_is_replicated=True, text_tokens=3),
    Idiom("cross attention", hw.Cross, text_is_context=True, text_tokens=7),
    Idiom("MLP beside", hw.WithMlp, independent=("mlp_in", "mlp_out")),
    Idiom("modulated", hw.Modulated, has_vector=True),
]

_ATTENTIONS = [
    Idiom("mask", hw.Block, has_mask=True),
    Idiom("causal", partial(hw.Block, attend=hw.causal), is_causal=True),
    Idiom(
        "grouped queries, repeated",
        partial(hw.Block, attend=hw.repeated, heads=24, kv_heads=8),
        **_grouped,
    ),
    Idiom(
        "grouped queries, by option",
        partial(hw.Block, attend=hw.grouped, heads=24, kv_heads=8),
        **_grouped,
    ),
    Idiom(
        "grouped queries, one kv head per rank",
        partial(hw.Block, attend=hw.repeated, heads=12, kv_heads=4),
        kv_heads=4,
    ),
    # Inductor makes one attention of [1, B*h, N, D] of these two before any pass runs.
    Idiom("batched matmuls", partial(hw.Block, attend=hw.batched_matmuls)),
    Idiom("batched matmuls, head first", partial(hw.Block, hw.HEAD_FIRST, hw.batched_matmuls)),
    Idiom("batched matmuls, one sample", partial(hw.Block, attend=hw.batched_matmuls), batch=1),
    Idiom(
        "batched matmuls with a bias",
        partial(hw.Block, attend=hw.added_matmuls),
        form="decomposed",
        has_mask=True,
    ),
    Idiom(
        "batched matmuls with a bias, in place",
        partial(hw.Block, hw.TRANSPOSED, hw.added_matmuls),
        form="decomposed",
        has_mask=True,
    ),
    Idiom("einsums", partial(hw.Block, attend=hw.einsums), form="decomposed"),
    Idiom("einsums, one sample", partial(hw.Block, attend=hw.einsums), form="decomposed", batch=1),
    Idiom(
        "einsums, one head per rank",
        partial(hw.Block, attend=hw.einsums, heads=4),
        form="decomposed",
        heads=4,
        kv_heads=4,
    ),
    Idiom(
        "matmuls with scale and mask",
        partial(hw.Block, attend=hw.masked_matmuls),
        form="decomposed",
        has_mask=True,
    ),
    Idiom(
        "einsums, packed by stack",
        partial(hw.Block, hw.STACKED, hw.einsums),
        form="decomposed",
        carries=_packed("qkv"),
    ),
    Idiom("norm and RoPE late", partial(hw.Block, attend=hw.normed_late), has_late_angles=True),
    Idiom(
        "norm and RoPE late, head first",
        partial(hw.Block, hw.HEAD_FIRST, hw.normed_late),
        has_late_angles=True,
    ),
]

_MORE = [
    Idiom(
        "queries in groups",
        partial(more.GroupedNorm, more.GROUPED, hw.repeated, heads=24, kv_heads=8),
        **_grouped,
    ),
    Idiom(
        "queries in groups, by option",
        partial(more.GroupedNorm, more.GROUPED, hw.grouped, heads=24, kv_heads=8),
        **_grouped,
    ),
    Idiom(
        "grouped queries, repeated before the exchange",
        partial(more.RepeatedEarly, heads=24, kv_heads=8),
        heads=24,
        kv_heads=24,
    ),
    Idiom(
        "small values",
        partial(more.SmallValues, attend=hw.einsums),
        form="decomposed",
        value_size=more.VALUE_SIZE,
    ),
    Idiom(
        "result read twice",
        more.ReadTwice,
        projections={**SEPARATE, "o": ("to_out", "to_more")},
    ),
    Idiom("rotated early", more.RotatedEarly),
    Idiom(
        "fused projection, rotated early",
        more.FusedRotatedEarly,
        projections={**dict.fromkeys("qkv", ("to_qkv",)), "o": ("to_out",)},
        columns=THIRDS,
    ),
    Idiom(
        "fused projection with MLP first",
        more.MlpFirst,
        projections={**dict.fromkeys("qkv", ("to_qkv_mlp_proj",)), "o": ("to_out",)},
        columns=THIRDS_BEHIND_MLP,
    ),
    Idiom(
        "fused projection cut from its end",
        more.FromTheEnd,
        projections={**dict.fromkeys("qkv", ("to_qkv",)), "o": ("to_out",)},
        columns=THIRDS,
    ),
    Idiom("heads scaled", more.ScaledHeads, has_vector=True),
    Idiom(
        "heads scaled, einsums",
        partial(more.ScaledHeads, attend=hw.einsums),
        has_vector=True,
        form="decomposed",
    ),
    Idiom(
        "heads scaled, packed by stack",
        partial(more.ScaledHeads, hw.STACKED),
        has_vector=True,
        carries=_packed("qkv"),
    ),
    Idiom("image before text", more.ImageFirst, **_text),
    Idiom("reversed late", partial(hw.Block, attend=partial(more.reversed_late, hw.fused))),
    Idiom(
        "reversed late, einsums",
        partial(hw.Block, attend=partial(more.reversed_late, hw.einsums)),
        form="decomposed",
    ),
    Idiom(
        "matmuls with scale and shift",
        partial(hw.Block, attend=more.scaled_matmuls),
        form="decomposed",
    ),
    Idiom(
        "batched matmuls with a bias, head first",
        partial(hw.Block, hw.HEAD_FIRST, hw.added_matmuls),
        form="decomposed",
        has_mask=True,
    ),
]

_DYNAMIC = [
    Idiom("dynamic", hw.Block, dynamic=True),
    Idiom("dynamic, head first", partial(hw.Block, hw.HEAD_FIRST), dynamic=True),
    Idiom("dynamic, in place", partial(hw.Block, hw.TRANSPOSED), dynamic=True),
    Idiom("dynamic, stack", partial(hw.Block, hw.STACKED), dynamic=True, carries=_packed("qkv")),
    Idiom("dynamic, joint", hw.Joint, has_text_angles=True, dynamic=True, **_text),
    Idiom(
        "dynamic, einsums",
        partial(hw.Block, attend=hw.einsums),
        form="decomposed",
        dynamic=True,
    ),
]


def _padding_heads(layout: hw.Layout, pad: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return partial(hw.Block, uneven.padding_heads(layout, pad), heads=uneven.UNEVEN_HEADS)


def _padding_tokens(
    layout: hw.Layout, keep: Callable[[Tensor, int], Tensor], **options: Any
) -> Callable[[], nn.Module]:
    attend = uneven.PaddedTokens(options.pop("attend", hw.fused), keep, **options)
    return partial(uneven.PadsTokens, layout, attend)


_ROWS = {"padded_tokens": uneven.BLOCK}
# Heads are counted with their padding: 12 of 10, the default.
_UNEVEN = [
    Idiom("heads padded", _padding_heads(hw.DIFFUSERS, uneven.heads_by_pad)),
    Idiom("heads padded, head first", _padding_heads(hw.HEAD_FIRST, uneven.heads_by_pad)),
    Idiom(
        "heads padded as first dim",
        partial(hw.Block, uneven.HEADS_FIRST_BY_PAD, heads=uneven.UNEVEN_HEADS),
    ),
    Idiom("heads padded by cat", _padding_heads(hw.TRANSPOSED, uneven.heads_by_cat)),
    Idiom(
        "heads padded, packed by stack",
        _padding_heads(hw.STACKED, uneven.heads_by_pad),
        carries=_packed("qkv"),
    ),
    Idiom("rows dropped by slices", _padding_tokens(hw.DIFFUSERS, uneven.rows_by_slices), **_ROWS),
    Idiom(
        "rows dropped by slices, head first",
        _padding_tokens(hw.HEAD_FIRST, uneven.rows_by_slices),
        **_ROWS,
    ),
    Idiom("rows dropped by index", _padding_tokens(hw.DIFFUSERS, uneven.rows_by_index), **_ROWS),
    Idiom("rows dropped by block", _padding_tokens(hw.TRANSPOSED, uneven.rows_by_block), **_ROWS),
    Idiom("rows dropped by parts", _padding_tokens(hw.DIFFUSERS, uneven.rows_by_parts), **_ROWS),
    Idiom(
        "rows dropped, one sample",
        _padding_tokens(hw.DIFFUSERS, uneven.rows_by_slices),
        batch=1,
        **_ROWS,
    ),
    Idiom(
        "rows dropped, einsums",
        _padding_tokens(hw.DIFFUSERS, uneven.rows_by_slices, attend=hw.einsums),
        form="decomposed",
        **_ROWS,
    ),
    Idiom(
        "rows dropped of the query too",
        _padding_tokens(hw.DIFFUSERS, uneven.rows_by_slices, fill=uneven.filled_by_pad),
        **_ROWS,
    ),
    Idiom(
        "rows dropped of the query too, put back by cat",
        _padding_tokens(hw.HEAD_FIRST, uneven.rows_by_block, fill=uneven.filled_by_cat),
        **_ROWS,
    ),
    Idiom(
        "rows dropped by slices, packed by stack",
        _padding_tokens(hw.STACKED, uneven.rows_by_slices),
        carries=_packed("qkv"),
        **_ROWS,
    ),
    Idiom(
        "rows dropped by block, packed by stack",
        _padding_tokens(hw.STACKED, uneven.rows_by_block),
        carries=_packed("qkv"),
        **_ROWS,
    ),
]

IDIOMS = [*_LAYOUTS, *_PROJECTIONS, *_ATTENTIONS, *_MORE, *_DYNAMIC, *_UNEVEN]
