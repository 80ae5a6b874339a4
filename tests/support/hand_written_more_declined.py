# SPDX-License-Identifier: Apache-2.0
"""More that recognition must not take for Ulysses: other attentions, exchanges, second groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from tests.support import hand_written as hw
from tests.support import hand_written_uneven as uneven
from tests.support.hand_written import QKV, Block, Layout, all_to_all, num_ranks
from tests.support.hand_written_declined import NearMiss, samples_in, samples_out, tokens_scattered

# Attentions


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q.relu() @ (k.relu().transpose(-2, -1) @ v)).transpose(1, 2)


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(-2, -1)).sigmoid() @ v).transpose(1, 2)


# Input and output exchanges


def round_robin_tokens_out(x: Tensor) -> Tensor:
    """Token i goes to rank i % P."""
    batch, tokens, heads, size = x.shape
    ranks = num_ranks()
    x = x.reshape(batch, tokens // ranks, ranks, heads, size).permute(2, 3, 0, 1, 4)
    x = all_to_all(x).reshape(ranks * heads, batch, tokens // ranks, size)
    return x.permute(1, 2, 0, 3)


def tokens_gathered_out(x: Tensor) -> Tensor:
    """Scatters tokens as it should, but makes tokens of the senders."""
    return tokens_scattered(x).permute(1, 0, 2, 3, 4).flatten(1, 2)


def senders_after_heads_out(x: Tensor) -> Tensor:
    """Head 0 of every rank, then head 1 of every rank, joined to head sizes; read as they are."""
    return tokens_scattered(x).permute(1, 2, 3, 0, 4).flatten(3).sin()


def flipped_out(x: Tensor) -> Tensor:
    return hw.diffusers_out(x.flip(1))


def repeated_out(x: Tensor) -> Tensor:
    return hw.diffusers_out(x.repeat(1, 2, 1, 1))


def gathered_late(other: dist.ProcessGroup) -> Callable[[QKV], QKV]:
    """Keys and values of a second group are gathered behind their exchange."""

    def enter(qkv: QKV) -> QKV:
        q, k, v = (hw.diffusers_in(x) for x in qkv)
        return q, *(funcol.all_gather_single(x, 1, other) for x in (k, v))

    return enter


def over_two_groups(attend: hw.Attend = hw.fused) -> Block:
    other = dist.new_group([0, 1])
    return Block(Layout(gathered_late(other), hw.diffusers_out), attend)


# Blocks


class AnyRows(Block):
    """Takes a result of any number of samples, tokens and heads."""

    def finish(self, attended: Tensor, _x: Tensor) -> Tensor:
        flat = attended.flatten(2)
        return F.linear(flat, self.to_out.weight.repeat(1, 8)[:, : flat.shape[-1]])


# Table


def _leaving(
    name: str, leave: Callable[[Tensor], Tensor], *reason: str, attend: hw.Attend = hw.fused
) -> NearMiss:
    layout = Layout(hw.each(hw.diffusers_in), leave)
    return NearMiss(f"output exchange {name}", partial(AnyRows, layout, attend), reason)


_not_known = ("heads are exchanged", "no attention this pass knows")
_usp = ("all_gather_into_tensor", "group '1'", "ring or gathered attention is not supported")

MORE_NEAR_MISSES = [
    _leaving("gathers samples", samples_out, "gathers something else than heads"),
    _leaving(
        "gathers samples, decomposed",
        samples_out,
        "gathers samples, not heads",
        attend=hw.einsums,
    ),
    _leaving("gathers tokens of rows", tokens_gathered_out, "interleaved over the ranks", "rank 4"),
    _leaving("deals tokens round-robin", round_robin_tokens_out, "tokens are dealt round-robin"),
    _leaving(
        "deals tokens round-robin, decomposed",
        round_robin_tokens_out,
        "tokens are dealt round-robin",
        attend=hw.einsums,
    ),
    _leaving("puts senders after heads", senders_after_heads_out, "rank 4"),
    _leaving("repeats tokens", repeated_out, "between attention and the exchange", "aten.repeat"),
    _leaving("flips tokens", flipped_out, "between attention and the exchange", "rev"),
    NearMiss(
        "heads padded as first dim, decomposed",
        partial(Block, uneven.HEADS_FIRST_BY_PAD, hw.einsums, heads=uneven.UNEVEN_HEADS),
        ("whether dims {1} hold samples or heads is unclear",),
    ),
    NearMiss(
        "input exchange scatters samples, rows dropped",
        partial(
            Block,
            Layout(hw.each(samples_in), samples_out),
            uneven.PaddedTokens(hw.fused, uneven.rows_by_slices, uneven.filled_by_pad, tokens=4),
        ),
        ("the exchange scatters dim 0", "samples"),
        batch=4,
    ),
    NearMiss("linear attention", partial(Block, attend=linear_attention), _not_known, count=3),
    NearMiss("sigmoid attention", partial(Block, attend=sigmoid_attention), _not_known, count=3),
    NearMiss("keys gathered over a second group", over_two_groups, _usp),
    NearMiss(
        "keys gathered over a second group, decomposed",
        partial(over_two_groups, attend=hw.einsums),
        _usp,
    ),
]
