# SPDX-License-Identifier: Apache-2.0
"""Graphs that recognition must not take for Ulysses: near misses with reasons, and bystanders.

The near misses break one rule each of the drawing at the head of `recognize_ulysses.py`; some are
nonsense as models, all are graphs that could come along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from tests.support import hand_written as hw
from tests.support.hand_written import (
    HEAD_SIZE,
    QKV,
    WIDTH,
    Block,
    Layout,
    all_to_all,
    group,
    num_ranks,
)

NUM_RANKS = 4


# Input and output exchanges that are not Ulysses'; [B, S, H, D] -> [B, N, h, D] and back


def uneven_in(x: Tensor) -> Tensor:
    """The other ranks hold a token less."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens, ranks, heads // ranks, size).permute(2, 1, 0, 3, 4)
    row = batch * heads // ranks * size
    received = [tokens * row] + [(tokens - 1) * row] * (ranks - 1)
    x = funcol.all_to_all_single(x.flatten(), received, [tokens * row] * ranks, group())
    return x.reshape(-1, batch, heads // ranks, size).permute(1, 0, 2, 3)


def gathered(x: Tensor) -> Tensor:
    """All heads of all tokens by all-gather, then this rank's heads."""
    x = funcol.all_gather_single(x.contiguous(), 1, group())
    return x.chunk(num_ranks(), dim=2)[dist.get_rank(group())]


def round_robin_in(x: Tensor) -> Tensor:
    """Head i goes to rank i % P."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens, heads // ranks, ranks, size).permute(3, 1, 0, 2, 4)
    return all_to_all(x).flatten(0, 1).permute(1, 0, 2, 3)


def interleaved_in(x: Tensor) -> Tensor:
    """Token 0 of every rank comes first, then token 1 of every rank."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens, ranks, heads // ranks, size).permute(2, 1, 0, 3, 4)
    return all_to_all(x).permute(2, 1, 0, 3, 4).flatten(1, 2)


def over_group(other: dist.ProcessGroup, x: Tensor) -> Tensor:
    """The input exchange, over a second group of as many ranks."""
    batch, tokens, heads, size = x.shape
    x = x.reshape(batch, tokens, NUM_RANKS, heads // NUM_RANKS, size).permute(2, 1, 0, 3, 4)
    x = funcol.all_to_all_single(x.flatten(), None, None, other)
    return x.reshape(NUM_RANKS * tokens, batch, heads // NUM_RANKS, size).permute(1, 0, 2, 3)


def scattered_sizes_out(x: Tensor) -> Tensor:
    """Gives each rank a part of every head instead of a part of the tokens."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens, heads, ranks, size // ranks).permute(3, 0, 1, 2, 4)
    x = all_to_all(x).permute(1, 2, 0, 3, 4)
    return x.reshape(batch, tokens, ranks * heads, size // ranks)[:, : tokens // ranks].repeat(
        1, 1, 1, ranks
    )


def sizes_in(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B, N, H, D/P]: all heads on every rank, but a part of each."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = hw.norm(x).reshape(batch, tokens, heads, ranks, size // ranks).permute(3, 1, 0, 2, 4)
    return all_to_all(x).flatten(0, 1).permute(1, 0, 2, 3)


def tokens_scattered(x: Tensor) -> Tensor:
    """[B, N, h, D] -> [P, B, S, h, D]: scatters tokens; what is first are the senders."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, ranks, tokens // ranks, heads, size)
    return all_to_all(x.permute(1, 0, 2, 3, 4))


def sizes_out(x: Tensor) -> Tensor:
    """The way back from `sizes_in`."""
    return tokens_scattered(x).permute(1, 2, 3, 0, 4).flatten(3)


def samples_in(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B/P, N, H, D]: each rank has samples of its own."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = hw.norm(x).reshape(ranks, batch // ranks, tokens, heads, size)
    return all_to_all(x).permute(1, 0, 2, 3, 4).flatten(1, 2)


def samples_out(x: Tensor) -> Tensor:
    """The way back from `samples_in`."""
    return tokens_scattered(x).flatten(0, 1)


def interleaved_heads_out(x: Tensor) -> Tensor:
    """Head 0 of every rank comes first, then head 1 of every rank."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, ranks, tokens // ranks, heads, size).permute(1, 3, 0, 2, 4)
    return all_to_all(x).permute(2, 3, 1, 0, 4).flatten(2, 3)


def gathered_tokens_out(x: Tensor) -> Tensor:
    """Scatters tokens as it should, but joins what it gets to tokens again."""
    x = tokens_scattered(x).permute(1, 0, 2, 3, 4).flatten(1, 2)
    return x.repeat(1, 1, num_ranks(), 1)


def quantised_in(x: Tensor) -> Tensor:
    return hw.diffusers_in((x * 16).to(torch.int8)).to(x.dtype) / 16


def only(one: Callable[[Tensor], Tensor], place: int) -> Layout:
    """`one` for query (0), key (1) or value (2), the usual way for the others."""

    def enter(qkv: QKV) -> QKV:
        return tuple(
            one(x) if index == place else hw.diffusers_in(x) for index, x in enumerate(qkv)
        )

    return Layout(enter, hw.diffusers_out)


# Blocks


class JoinedLate(Block):
    """The query comes in two exchanges and is joined behind them."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        halves = [hw.diffusers_in(half) for half in (q[:, :2], q[:, 2:])]
        attended = self.attend(torch.cat(halves, dim=1), hw.diffusers_in(k), hw.diffusers_in(v))
        return self.finish(self.layout.leave(attended), x)


class Backwards(Block):
    """Heads are sharded outside; the exchanges make tokens sharded inside."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        qkv = [hw.diffusers_out(part) for part in self.project(x)]
        return self.finish(hw.diffusers_in(self.attend(*qkv)), x)


class ReturnsKey(Block):
    """The exchanged key is also a result of the model."""

    def forward(self, x: Tensor) -> QKV:  # type: ignore[override]
        q, k, v = self.layout.enter(self.project(x))
        return self.finish(self.layout.leave(self.attend(q, k, v)), x), k


class SharedQuery(Block):
    """Two attentions, as the turns of a ring, read one exchanged query."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        query = hw.diffusers_in(q)
        turns = [
            self.layout.leave(self.attend(query, hw.diffusers_in(key), hw.diffusers_in(value)))
            for key, value in ((k, v), (k.flip(1), v.flip(1)))
        ]
        return self.finish(turns[0] + turns[1], x)


class ResultTwice(Block):
    """The result is exchanged back twice."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        attended = self.attend(*self.layout.enter(self.project(x)))
        back = self.layout.leave(attended) + self.layout.leave(attended * 2)
        return self.finish(back, x)


class RowParallel(Block):
    """The result stays as it is: this rank's heads of all tokens."""

    def finish(self, attended: Tensor, _x: Tensor) -> Tensor:
        return F.linear(attended.flatten(2), self.to_out.weight[:, : attended.shape[2] * HEAD_SIZE])


class Broken(Block):
    """Python steps in between the exchanges and the attention."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.layout.enter(self.project(x))
        torch._dynamo.graph_break()
        return self.finish(self.layout.leave(self.attend(q, k, v)), x)


@torch.library.custom_op("hand_written::opaque_attention", mutates_args=())
def opaque_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.fused(q, k, v).contiguous()


@opaque_attention.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
    return torch.empty_like(q)


# Bystanders


class Experts(nn.Module):
    """MoE: tokens go to the ranks of their experts and come back."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.activation = activation
        self.first = nn.Parameter(torch.randn(2, WIDTH, 48))
        self.second = nn.Parameter(torch.randn(2, 48, WIDTH))
        self.router = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        chosen = self.router(x).softmax(-1).transpose(1, 2) @ x
        sent = chosen.reshape(NUM_RANKS, 2, batch, width).contiguous()
        got = all_to_all(sent).permute(1, 0, 2, 3).reshape(2, -1, width)
        got = torch.bmm(self.activation(torch.bmm(got, self.first)), self.second)
        back = got.reshape(2, NUM_RANKS, batch, width).permute(1, 0, 2, 3)
        return x + all_to_all(back).flatten(0, 1).mean(0)[:, None].expand(batch, tokens, width)


class LocalBlock(Block):
    """No exchange at all."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.reference(x)


class GatheredBlock(Block):
    """Keys and values by all-gather, queries stay."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        k, v = (funcol.all_gather_single(part.contiguous(), 1, group()) for part in (k, v))
        return self.finish(self.attend(q, k, v), x)


class AttentionThenExperts(nn.Module):
    """A Ulysses attention, a local one and experts, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.ulysses, self.local, self.experts = Block(), LocalBlock(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ulysses(x)
        return self.experts(x + self.local(x))


# Tables


@dataclass(frozen=True)
class NearMiss:
    """A model that must be declined, `count` times, with every one of `reason` in each reason."""

    name: str
    build: Callable[[], nn.Module]
    reason: tuple[str, ...]
    count: int = 1
    num_ranks: int = NUM_RANKS
    batch: int = 2
    sharded_heads: bool = False

    def __str__(self) -> str:
        return self.name

    def arguments(self) -> tuple[Tensor, ...]:
        return (torch.ones(self.batch, 20 if self.sharded_heads else 5, WIDTH),)


def _with(layout: Layout) -> Callable[[], nn.Module]:
    return partial(Block, layout)


_query_row = 2 * 3 * HEAD_SIZE

NEAR_MISSES = [
    NearMiss(
        "unequal splits",
        _with(Layout(hw.each(uneven_in), lambda x: hw.diffusers_out(x[:, :16]))),
        (
            "unequal splits",
            str([5 * _query_row] * 4),
            str([5 * _query_row, *[4 * _query_row] * 3]),
        ),
    ),
    *(
        NearMiss(
            f"{name} not exchanged",
            _with(only(gathered, place)),
            (f"the {name} of this attention comes from no all-to-all",),
        )
        for place, name in enumerate(("query", "key", "value"))
    ),
    NearMiss(
        "result not exchanged back",
        partial(RowParallel, Layout(hw.each(hw.diffusers_in), lambda x: x)),
        ("the result of this attention is not exchanged back",),
    ),
    NearMiss(
        "different groups",
        lambda: Block(only(partial(over_group, dist.new_group(range(NUM_RANKS))), 1)),
        ("different groups, '0' and '1'",),
    ),
    NearMiss(
        "query joined late", JoinedLate, ("the query is joined from 2 all-to-alls", "wait_tensor")
    ),
    NearMiss(
        "round-robin heads",
        _with(Layout(hw.each(round_robin_in), hw.diffusers_out)),
        ("heads are dealt round-robin",),
    ),
    NearMiss(
        "round-robin heads of the key alone",
        _with(only(round_robin_in, 1)),
        ("heads are dealt round-robin",),
    ),
    NearMiss(
        "interleaved tokens",
        _with(Layout(hw.each(interleaved_in), hw.diffusers_out)),
        ("received tokens are interleaved over the ranks", "rank 4"),
    ),
    NearMiss(
        "gathers heads",
        partial(Backwards, heads=3),
        ("gathers dim 1", "its tokens are dim 2"),
        sharded_heads=True,
    ),
    NearMiss("key is a result too", ReturnsKey, ("the exchanged key also feeds output",)),
    NearMiss(
        "query shared by two attentions",
        SharedQuery,
        ("the exchanged query also feeds", "not this attention alone"),
        count=2,
    ),
    NearMiss("result exchanged twice", ResultTwice, ("the result goes into 2 all-to-alls",)),
    NearMiss(
        "int8 payload",
        _with(Layout(hw.each(quantised_in), hw.diffusers_out)),
        ("the exchange carries torch.int8",),
    ),
    NearMiss(
        "opaque attention",
        partial(Block, attend=opaque_attention),
        ("hand_written.opaque_attention", "no attention this pass knows"),
        count=3,
    ),
    NearMiss(
        "output exchange scatters head sizes",
        _with(Layout(hw.each(hw.diffusers_in), scattered_sizes_out)),
        ("the output exchange scatters dim 3 of the result", "its tokens are dim 2"),
    ),
    NearMiss(
        "output exchange gathers tokens",
        _with(Layout(hw.each(hw.diffusers_in), gathered_tokens_out)),
        ("gathers",),
    ),
    NearMiss(
        "output exchange interleaves heads",
        _with(Layout(hw.each(hw.diffusers_in), interleaved_heads_out)),
        ("received heads are interleaved over the ranks", "rank 4"),
    ),
    NearMiss(
        "input exchange scatters head sizes",
        _with(Layout(hw.each(sizes_in), sizes_out)),
        ("the exchange scatters dim 3",),
    ),
    NearMiss(
        "input exchange scatters samples",
        _with(Layout(hw.each(samples_in), samples_out)),
        ("the exchange scatters dim 0", "samples"),
        batch=4,
    ),
    NearMiss("one rank", Block, ("group '0' has one rank",), num_ranks=1),
]

BYSTANDERS: list[tuple[str, Callable[[], nn.Module], int, int]] = [
    ("experts", Experts, 0, 2),
    ("experts with SiLU", partial(Experts, F.silu), 0, 2),
    ("experts with ELU", partial(Experts, F.elu), 0, 2),
    ("experts with Mish", partial(Experts, F.mish), 0, 2),
    ("local attention", LocalBlock, 0, 0),
    ("local attention, decomposed", partial(LocalBlock, attend=hw.einsums), 0, 0),
    ("attention on gathered keys", GatheredBlock, 0, 0),
    ("Ulysses, local attention and experts", AttentionThenExperts, 1, 2),
]
"""(name, build, Ulysses attentions, unrelated all-to-alls)"""
