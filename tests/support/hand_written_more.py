# SPDX-License-Identifier: Apache-2.0
"""More Ulysses attentions as people write them: heads in groups, late and early rotations, results
with several readers. On the skeleton of `hand_written.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import hand_written as hw
from tests.support.hand_written import HEAD_SIZE, QKV, WIDTH, Block, Layout, all_to_all, num_ranks

VALUE_SIZE = 4
MLP_WIDTH = 40


# Input exchanges and attentions


def grouped_in(x: Tensor) -> Tensor:
    """[B, S, G, T, D] -> [B, N, g*T, D]: groups of T heads stay together."""
    batch, tokens, groups, times, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens, ranks, groups // ranks, times, size).permute(2, 1, 0, 3, 4, 5)
    return all_to_all(x).flatten(0, 1).permute(1, 0, 2, 3, 4).flatten(2, 3)


def grouped_query_in(qkv: QKV) -> QKV:
    query, key, value = qkv
    return grouped_in(query), hw.diffusers_in(key), hw.diffusers_in(value)


GROUPED = Layout(grouped_query_in, hw.diffusers_out)


def rotate_halves(x: Tensor) -> Tensor:
    """RoPE of which no element comes from its own place alone."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * 0.8 - second * 0.6, first * 0.6 + second * 0.8), dim=-1)


def scaled_matmuls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5 + 0.25
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def reversed_late(attend: hw.Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head elements in another order, which no layout follows; the same for query and key."""
    return attend(q.flip(3), k.flip(3), v)


# Blocks


class GroupedNorm(Block):
    """The query keeps its groups, [B, S, G, T, D], from the norm to the exchange."""

    def project(self, x: Tensor) -> QKV:
        q, k, v = super().project(x)
        return hw.norm(q.unflatten(2, (self.kv_heads, -1))), hw.norm(k), v

    def reference(self, x: Tensor, *extra: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.finish(self.attend(q.flatten(2, 3), k, v, *extra), x)


class RepeatedEarly(Block):
    """Grouped queries whose keys and values are repeated before they are exchanged."""

    def project(self, x: Tensor) -> QKV:
        q, k, v = super().project(x)
        times = self.heads // self.kv_heads
        return q, k.repeat_interleave(times, dim=2), v.repeat_interleave(times, dim=2)


class SmallValues(Block):
    """Heads of the value are smaller than those of query and key."""

    def build(self) -> None:
        super().build()
        self.to_v = nn.Linear(WIDTH, self.heads * VALUE_SIZE)
        self.to_out = nn.Linear(self.heads * VALUE_SIZE, WIDTH)

    def project(self, x: Tensor) -> QKV:
        projected = (self.to_q(x), self.to_k(x), self.to_v(x))
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in projected)


class ReadTwice(Block):
    """Two projections and a sum read the result, one of them behind an activation."""

    def build(self) -> None:
        super().build()
        self.to_more = nn.Linear(self.heads * HEAD_SIZE, WIDTH)

    def finish(self, attended: Tensor, _x: Tensor) -> Tensor:
        scale = attended.sum(dim=(2, 3), keepdim=True).flatten(2)
        flat = attended.flatten(2)
        return self.to_out(flat) + self.to_more(flat.relu()) * scale


class RotatedEarly(Block):
    """RoPE on query and key before the exchange, from halves alone."""

    def project(self, x: Tensor) -> QKV:
        q, k, v = super().project(x)
        return rotate_halves(q), rotate_halves(k), v


class FusedRotatedEarly(hw.FusedProjection):
    """The same on parts of one GEMM."""

    def project(self, x: Tensor) -> QKV:
        q, k, v = super().project(x)
        return rotate_halves(q), rotate_halves(k), v


class MlpFirst(hw.FusedWithMlp):
    """One GEMM for the MLP, then query, key and value: splits in splits, none from column 0."""

    def run(self, x: Tensor, attend: Callable[[QKV], Tensor]) -> Tensor:
        mlp, qkv = self.to_qkv_mlp_proj(x).split([MLP_WIDTH, 3 * self.inner], dim=-1)
        attended = attend(tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in qkv.chunk(3, -1)))
        return self.to_out(torch.cat((attended.flatten(2), F.gelu(mlp)), dim=-1))


class FromTheEnd(hw.FusedProjection):
    """Parts of a fused projection are counted from its last column."""

    def project(self, x: Tensor) -> QKV:
        inner = self.heads * HEAD_SIZE
        qkv = self.to_qkv(x)
        parts = (qkv[..., : -2 * inner], qkv[..., -2 * inner : -inner], qkv[..., -inner:])
        return tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in parts)


class ScaledHeads(Block):
    """Query and key are scaled by one vector per sample, which has a GEMM of its own."""

    def build(self) -> None:
        super().build()
        self.modulation = nn.Linear(WIDTH, HEAD_SIZE)

    def scaled(self, x: Tensor, vector: Tensor) -> QKV:
        q, k, v = self.project(x)
        scale = 1 + self.modulation(F.silu(vector))[:, None, None]
        return hw.norm(q) * scale, hw.norm(k) * scale, v

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:  # type: ignore[override]
        qkv = self.layout.enter(self.scaled(x, vector))
        return self.finish(self.layout.leave(self.attend(*qkv)), x)

    def reference(self, x: Tensor, vector: Tensor) -> Tensor:  # type: ignore[override]
        return self.finish(self.attend(*self.scaled(x, vector)), x)


class ImageFirst(hw.Joint):
    """Text is projected first, but stands behind the image."""

    def joined(self, image: Tensor, text: Tensor, _angles: QKV) -> QKV:
        texts = (self.add_q(text), self.add_k(text), self.add_v(text))
        texts = tuple(part.unflatten(-1, (-1, HEAD_SIZE)) for part in texts)
        pairs = zip(self.project(image), texts, strict=True)
        return tuple(torch.cat(pair, dim=1) for pair in pairs)

    def parts(self, attended: Tensor, text: Tensor) -> QKV:
        tokens = attended.shape[1] - text.shape[1]
        attended = attended.flatten(2)
        return self.to_out(attended[:, :tokens]), self.to_add_out(attended[:, tokens:])


class Gated(Block):
    """A gate is exchanged like the query and multiplied onto the result before that is sent."""

    def build(self) -> None:
        super().build()
        self.to_gate = nn.Linear(WIDTH, self.heads * HEAD_SIZE)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        attended = self.attend(*self.layout.enter(self.project(x)))
        gate = hw.diffusers_in(self.to_gate(x).unflatten(-1, (-1, HEAD_SIZE))).sigmoid()
        return self.finish(self.layout.leave(attended * gate), x)


class Dual(nn.Module):
    """Two attentions on one input, as in dual attention blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class WithSides(nn.Module):
    """Two attentions in a row; before, between and behind them work that nothing here reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.before, self.between, self.behind = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> QKV:
        before = self.before(x)
        y = self.first(x)
        between = self.between(x)
        z = self.second(y)
        return z, before, between, self.behind(x)
