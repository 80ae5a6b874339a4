# SPDX-License-Identifier: Apache-2.0
"""Ulysses attentions as people write them, each a few lines on one skeleton.

    project   x [B, S, W]    -> q, k, v [B, S, H, D]
    enter     q, k, v        -> [B, N, h, D]         the layout's input exchange
    attend    q, k, v        -> [B, N, h, D]
    leave     [B, N, h, D]   -> [B, S, H, D]         the layout's output exchange

`reference` leaves out enter and leave: the same attention, unsharded, on the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

QKV: TypeAlias = "tuple[Tensor, ...]"
Attend: TypeAlias = Callable[..., Tensor]

WIDTH, HEAD_SIZE, HEADS = 32, 8, 12


def group() -> dist.ProcessGroup:
    """The Ulysses group; a test may replace it."""
    return dist.group.WORLD


def num_ranks() -> int:
    return dist.get_world_size(group())


def all_to_all(x: Tensor) -> Tensor:
    return funcol.all_to_all_single(x.contiguous(), None, None, group())


# Layouts


@dataclass(frozen=True)
class Layout:
    """A way to write both exchanges; `enter` takes and returns query, key and value."""

    enter: Callable[[QKV], QKV]
    leave: Callable[[Tensor], Tensor]


def diffusers_in(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens, ranks, heads // ranks, size).permute(2, 1, 0, 3, 4)
    x = all_to_all(x.flatten()).reshape(ranks, tokens, batch, heads // ranks, size)
    return x.flatten(0, 1).permute(1, 0, 2, 3).contiguous()


def diffusers_out(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, ranks, tokens // ranks, heads, size).permute(1, 3, 0, 2, 4)
    x = all_to_all(x.flatten()).reshape(ranks * heads, batch, tokens // ranks, size)
    return x.permute(1, 2, 0, 3)


def head_first_in(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = all_to_all(x.permute(2, 0, 1, 3)).view(ranks, heads // ranks, batch, tokens, size)
    return x.permute(2, 0, 3, 1, 4).reshape(batch, ranks * tokens, heads // ranks, size)


def head_first_out(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = all_to_all(x.permute(1, 0, 2, 3)).view(ranks, tokens // ranks, batch, heads, size)
    return x.permute(2, 1, 0, 3, 4).reshape(batch, tokens // ranks, ranks * heads, size)


def _in_place(x: Tensor) -> Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    dist.all_to_all_single(output, x, group=group())
    return output


def transposed_in(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = _in_place(x.reshape(batch, tokens, ranks, heads // ranks, size).transpose(0, 2))
    return x.reshape(ranks * tokens, batch, heads // ranks, size).transpose(0, 1)


def transposed_out(x: Tensor) -> Tensor:
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, ranks, tokens // ranks, heads, size).transpose(0, 3).transpose(0, 1)
    x = _in_place(x.reshape(ranks, heads, tokens // ranks, batch, size))
    return x.reshape(ranks * heads, tokens // ranks, batch, size).transpose(0, 2)


def packed_in(x: Tensor) -> Tensor:
    """[C, B, S, H, D] -> [C, B, N, h, D]"""
    count, batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(count, batch, tokens, ranks, heads // ranks, size).permute(3, 0, 1, 2, 4, 5)
    x = all_to_all(x).permute(1, 2, 0, 3, 4, 5)
    return x.reshape(count, batch, ranks * tokens, heads // ranks, size)


def stacked_in(qkv: QKV) -> QKV:
    return packed_in(torch.stack(qkv)).unbind(0)


def concatenated_in(qkv: QKV) -> QKV:
    return diffusers_in(torch.cat(qkv, dim=-1)).chunk(3, dim=-1)


def batched_in(qkv: QKV) -> QKV:
    return diffusers_in(torch.cat(qkv, dim=0)).chunk(3, dim=0)


def at_once_in(qkv: QKV) -> QKV:
    """One tensor [B, S, 3, H, D], as a fused projection leaves it."""
    return packed_in(qkv[0].permute(2, 0, 1, 3, 4)).unbind(0)


def query_apart_in(qkv: QKV) -> QKV:
    query, key, value = qkv
    return (diffusers_in(query), *packed_in(torch.stack((key, value))).unbind(0))


def key_is_value_in(qkv: QKV) -> QKV:
    key = diffusers_in(qkv[1])
    return diffusers_in(qkv[0]), key, key


def chunked_in(x: Tensor) -> Tensor:
    """A list of blocks out, a list of blocks in, as `dist.all_to_all` takes them."""
    ranks = num_ranks()
    return torch.cat(all_to_all(torch.stack(x.chunk(ranks, dim=2))).unbind(0), dim=1)


def chunked_out(x: Tensor) -> Tensor:
    ranks = num_ranks()
    return torch.cat(all_to_all(torch.stack(x.chunk(ranks, dim=1))).unbind(0), dim=2)


def each(one: Callable[[Tensor], Tensor]) -> Callable[[QKV], QKV]:
    return lambda qkv: tuple(one(x) for x in qkv)


DIFFUSERS = Layout(each(diffusers_in), diffusers_out)
HEAD_FIRST = Layout(each(head_first_in), head_first_out)
TRANSPOSED = Layout(each(transposed_in), transposed_out)
STACKED = Layout(stacked_in, diffusers_out)
CONCATENATED = Layout(concatenated_in, diffusers_out)
BATCHED = Layout(batched_in, diffusers_out)
AT_ONCE = Layout(at_once_in, diffusers_out)
CHUNKED = Layout(each(chunked_in), chunked_out)
KEY_IS_VALUE = Layout(key_is_value_in, diffusers_out)
QUERY_APART = Layout(query_apart_in, diffusers_out)


# Attentions on [B, N, h, D]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q, k, v, enable_gqa=True)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[2] // k.shape[2]
    return fused(q, k.repeat_interleave(times, dim=2), v.repeat_interleave(times, dim=2))


def batched_matmuls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, _, heads, size = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    weights = torch.bmm(q * size**-0.5, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (batch, heads)).transpose(1, 2)


def added_matmuls(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    batch, _, heads, size = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    bias = bias.expand(-1, heads, -1, -1).flatten(0, 1)
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=size**-0.5).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (batch, heads)).transpose(1, 2)


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bnhd,bmhd->bhnm", q, k).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def masked_matmuls(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + mask
    return (scores.softmax(-1) @ v).transpose(1, 2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE with angles [1, tokens, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


def normed_late(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    return fused(rotate(norm(q), angles), rotate(norm(k), angles), v)


# Blocks


class Block(nn.Module):
    """Projections of their own for query, key and value."""

    def __init__(
        self,
        layout: Layout = DIFFUSERS,
        attend: Attend = fused,
        heads: int = HEADS,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.layout, self.attend, self.heads = layout, attend, heads
        self.kv_heads = kv_heads or heads
        self.build()

    def build(self) -> None:
        self.to_q = nn.Linear(WIDTH, self.heads * HEAD_SIZE)
        self.to_k = nn.Linear(WIDTH, self.kv_heads * HEAD_SIZE, bias=False)
        self.to_v = nn.Linear(WIDTH, self.kv_heads * HEAD_SIZE)
        self.to_out = nn.Linear(self.heads * HEAD_SIZE, WIDTH)

    def project(self, x: Tensor) -> QKV:
        projected = (self.to_q(x), self.to_k(x), self.to_v(x))
        return tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in projected)

    def finish(self, attended: Tensor, _x: Tensor) -> Tensor:
        return self.to_out(attended.flatten(2))

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        qkv = self.layout.enter(self.project(x))
        return self.finish(self.layout.leave(self.attend(*qkv, *extra)), x)

    def reference(self, x: Tensor, *extra: Tensor) -> Tensor:
        return self.finish(self.attend(*self.project(x), *extra), x)


class FusedProjection(Block):
    """One GEMM for query, key and value, split before three exchanges."""

    def build(self) -> None:
        self.to_qkv = nn.Linear(WIDTH, 3 * self.heads * HEAD_SIZE)
        self.to_out = nn.Linear(self.heads * HEAD_SIZE, WIDTH)

    def project(self, x: Tensor) -> QKV:
        return tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in self.to_qkv(x).chunk(3, -1))


class KeyIsValue(Block):
    """One projection and one exchange for key and value."""

    def project(self, x: Tensor) -> QKV:
        q, k, _ = super().project(x)
        return q, k, k


class FusedAtOnce(FusedProjection):
    """The fused projection's result goes into one exchange as it is."""

    def project(self, x: Tensor) -> QKV:
        return (self.to_qkv(x).unflatten(-1, (3, self.heads, HEAD_SIZE)),)

    def reference(self, x: Tensor, *extra: Tensor) -> Tensor:
        return self.finish(self.attend(*self.project(x)[0].unbind(2), *extra), x)


class FusedWithMlp(Block):
    """One GEMM for query, key, value and the MLP beside them, one GEMM for both results."""

    def build(self) -> None:
        self.inner = self.heads * HEAD_SIZE
        self.to_qkv_mlp_proj = nn.Linear(WIDTH, 3 * self.inner + 40, bias=False)
        self.to_out = nn.Linear(self.inner + 40, WIDTH, bias=False)

    def run(self, x: Tensor, attend: Callable[[QKV], Tensor]) -> Tensor:
        qkv, mlp = self.to_qkv_mlp_proj(x).split([3 * self.inner, 40], dim=-1)
        attended = attend(tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in qkv.chunk(3, -1)))
        return self.to_out(torch.cat((attended.flatten(2), F.gelu(mlp)), dim=-1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.run(x, lambda qkv: self.layout.leave(self.attend(*self.layout.enter(qkv))))

    def reference(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.run(x, lambda qkv: self.attend(*qkv))


class Joint(Block):
    """Text and image: projected apart, joined before the exchange; norm and RoPE on q and k."""

    def build(self) -> None:
        super().build()
        self.add_q, self.add_k, self.add_v = (
            nn.Linear(WIDTH, self.heads * HEAD_SIZE) for _ in range(3)
        )
        self.to_add_out = nn.Linear(self.heads * HEAD_SIZE, WIDTH)

    def joined(self, image: Tensor, text: Tensor, angles: QKV) -> QKV:
        texts = (self.add_q(text), self.add_k(text), self.add_v(text))
        texts = tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in texts)
        joined = [torch.cat(pair, dim=1) for pair in zip(texts, self.project(image), strict=True)]
        q, k = (rotate(norm(x), torch.cat(angles, dim=1)) for x in joined[:2])
        return q, k, joined[2]

    def parts(self, attended: Tensor, text: Tensor) -> QKV:
        tokens = text.shape[1]
        attended = attended.flatten(2)
        return self.to_out(attended[:, tokens:]), self.to_add_out(attended[:, :tokens])

    def forward(self, image: Tensor, text: Tensor, *angles: Tensor) -> QKV:  # type: ignore[override]
        qkv = self.layout.enter(self.joined(image, text, angles))
        return self.parts(self.layout.leave(self.attend(*qkv)), text)

    def reference(self, image: Tensor, text: Tensor, *angles: Tensor) -> QKV:  # type: ignore[override]
        return self.parts(self.attend(*self.joined(image, text, angles)), text)


class ReplicatedText(Joint):
    """Every rank holds all text: it slices its heads of it, and gathers the result over heads."""

    def texts(self, text: Tensor) -> QKV:
        texts = (self.add_q(text), self.add_k(text), self.add_v(text))
        return tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in texts)

    def my_heads(self, x: Tensor) -> Tensor:
        return x.chunk(num_ranks(), dim=2)[dist.get_rank(group())]

    def finish_both(self, image: Tensor, text: Tensor) -> QKV:
        return self.to_out(image.flatten(2)), self.to_add_out(text.flatten(2))

    def forward(self, image: Tensor, text: Tensor) -> QKV:  # type: ignore[override]
        images = self.layout.enter(self.project(image))
        texts = (self.my_heads(part) for part in self.texts(text))
        pairs = zip(texts, images, strict=True)
        attended = self.attend(*(torch.cat(pair, dim=1) for pair in pairs))
        tokens = text.shape[1]
        gathered = funcol.all_gather_single(attended[:, :tokens], 2, group())
        return self.finish_both(self.layout.leave(attended[:, tokens:]), gathered)

    def reference(self, image: Tensor, text: Tensor) -> QKV:  # type: ignore[override]
        pairs = zip(self.texts(text), self.project(image), strict=True)
        attended = self.attend(*(torch.cat(pair, dim=1) for pair in pairs))
        tokens = text.shape[1]
        return self.finish_both(attended[:, tokens:], attended[:, :tokens])


class Cross(Block):
    """Keys and values from another sequence, of another length."""

    def projected(self, x: Tensor, context: Tensor) -> QKV:
        projected = (self.to_q(x), self.to_k(context), self.to_v(context))
        return tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in projected)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        qkv = self.layout.enter(self.projected(x, context))
        return self.finish(self.layout.leave(self.attend(*qkv)), x)

    def reference(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return self.finish(self.attend(*self.projected(x, context)), x)


class WithMlp(Block):
    """An MLP of its own beside the attention, on the same input."""

    def build(self) -> None:
        super().build()
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        return super().finish(attended, x) + self.mlp_out(F.gelu(self.mlp_in(x)))


class Modulated(Block):
    """Scale and shift from one vector per sample, as in adaLN."""

    def build(self) -> None:
        super().build()
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)

    def modulate(self, x: Tensor, vector: Tensor) -> Tensor:
        scale, shift = self.modulation(F.silu(vector)).unsqueeze(1).chunk(2, dim=-1)
        return F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.modulate(x, vector))

    def reference(self, x: Tensor, vector: Tensor) -> Tensor:  # type: ignore[override]
        return super().reference(self.modulate(x, vector))


class Stack(nn.Module):
    """Blocks with residuals."""

    def __init__(self, count: int, layout: Layout = DIFFUSERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithMlp(layout) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def reference(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.reference(x)
        return x
