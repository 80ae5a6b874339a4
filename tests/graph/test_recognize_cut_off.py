# SPDX-License-Identifier: Apache-2.0
"""Tests that whatever looks like an exchange around an attention is a site or is declined: also
where a graph break parts the two, where another op exchanges, and where a branch or a loop hides
it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch import distributed as dist

from cocodiff_compile import Explanation, explain
from cocodiff_compile.ir.collectives import communicates, is_all_to_all, is_collective
from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import (
    HEAD_FIRST,
    QKV,
    WIDTH,
    Block,
    Layout,
    batched_matmuls,
    diffusers_in,
    diffusers_out,
    each,
    fused,
    group,
    num_ranks,
)
from tests.support.hand_written_declined import NUM_RANKS, Experts
from tests.support.traced import traced

HEADS = 16
TOKENS = 4
BREAK = "graph break"


def _explained(model: nn.Module, *more: Tensor) -> Explanation:
    torch._dynamo.reset()
    with fake_ranks(NUM_RANKS):
        return explain(model, torch.ones(2, TOKENS, WIDTH), *more)


def _reasons(explanation: Explanation) -> list[str]:
    return [item.reason for item in explanation.declined]


# Graph breaks


class TwoBlocks(nn.Module):
    """Two attentions; Python steps in at one seam of the second."""

    def __init__(self, seam: str, layout: Layout, attend: Callable[..., Tensor] = fused) -> None:
        super().__init__()
        self.first, self.second = Block(heads=HEADS), Block(layout, attend, heads=HEADS)
        self.seam = seam

    def at(self, seam: str) -> None:
        if seam in self.seam:
            torch._dynamo.graph_break()

    def forward(self, x: Tensor) -> Tensor:
        x, block = self.first(x), self.second
        qkv = block.project(x)
        self.at("projected")
        qkv = block.layout.enter(qkv)
        self.at("entered")
        attended = block.attend(*qkv)
        self.at("attended")
        left = block.layout.leave(attended)
        self.at("left")
        return block.finish(left, x)


LAYOUTS = {"diffusers": Layout(each(diffusers_in), diffusers_out), "head first": HEAD_FIRST}


@pytest.mark.parametrize(
    ("layout", "attend"), [("diffusers", fused), ("head first", batched_matmuls)]
)
@pytest.mark.parametrize("seam", ["entered", "attended", "entered, attended"])
def test_an_attention_that_a_graph_break_parts_from_its_exchanges_is_declined(
    seam: str, layout: str, attend: Callable[..., Tensor]
) -> None:
    explanation = _explained(TwoBlocks(seam, LAYOUTS[layout], attend))
    assert len(explanation.sites) == 1
    assert not any(graph.report.recognition.unrelated for graph in explanation.graphs)
    first, *others = explanation.graphs
    assert all(BREAK in reason for reason in _reasons(explanation))
    # Each piece that holds a part of the attention says so.
    pieces = [graph.report.declined for graph in (first, *others)]
    assert all(pieces), [len(piece) for piece in pieces]


@pytest.mark.parametrize("seam", ["projected, left"])
def test_a_break_outside_of_the_exchanges_hides_nothing(seam: str) -> None:
    explanation = _explained(TwoBlocks(seam, LAYOUTS["diffusers"]))
    assert len(explanation.sites) == 2
    assert explanation.declined == ()


def _by_lists(x: Tensor, cut: int, join: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(num_ranks(), dim=cut)]
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts, group=group())
    return torch.cat(received, dim=join)


@torch.compiler.disable
def _eager_in(qkv: QKV) -> QKV:
    return tuple(diffusers_in(part) for part in qkv)


@torch.compiler.disable
def _eager_out(x: Tensor) -> Tensor:
    return diffusers_out(x)


OUTSIDE = {
    "lists": Layout(each(lambda x: _by_lists(x, 2, 1)), lambda x: _by_lists(x, 1, 2)),
    "not compiled": Layout(_eager_in, _eager_out),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", OUTSIDE)
def test_an_attention_that_is_exchanged_outside_of_its_graph_is_declined(layout: str) -> None:
    explanation = _explained(TwoBlocks("", OUTSIDE[layout]))
    assert len(explanation.sites) == 1
    (reason,) = _reasons(explanation)
    assert "query, key and value of this attention come from outside of this graph" in reason
    assert "torch.distributed.all_to_all with lists" in reason


def test_without_other_ranks_an_attention_on_inputs_is_nothing_special() -> None:
    inputs = [torch.ones(2, TOKENS, HEADS, 8) for _ in range(3)]
    (gm,) = capture(fused, *inputs)
    assert recognize(gm.graph).declined == ()
    with fake_ranks(1):
        assert recognize(gm.graph).declined == ()
    with fake_ranks(2):
        (item,) = recognize(gm.graph).declined
    assert item.node.graph is gm.graph


def test_an_attention_that_computes_its_operands_is_local() -> None:
    class CachedKeys(Block):
        def forward(self, x: Tensor, cached: Tensor) -> Tensor:  # type: ignore[override]
            return self.finish(self.attend(self.project(x)[0], cached, cached), x)

    cached = torch.ones(2, TOKENS, HEADS, 8)
    assert _explained(CachedKeys(heads=HEADS), cached).declined == ()


def test_the_way_out_alone_is_no_bystander() -> None:
    """The tokens come first here, so that the exchange looks as if it scattered whole rows."""

    def leave(x: Tensor) -> Tensor:
        x = funcol.all_to_all_single(x.contiguous(), None, None, group())
        return x.flatten(1).sum(1)

    with fake_ranks(NUM_RANKS):
        (gm,) = capture(leave, torch.ones(8, HEADS, 2, 8))
        recognition = recognize(gm.graph)
    assert recognition.unrelated == ()
    (item,) = recognition.declined
    assert BREAK in item.reason and "comes from outside of this graph" in item.reason


def test_experts_on_inputs_of_a_graph_stay_bystanders() -> None:
    class Sent(Experts):
        def forward(self, x: Tensor) -> Tensor:
            got = funcol.all_to_all_single(x.contiguous(), None, None, group())
            got = torch.bmm(self.activation(torch.bmm(got, self.first)), self.second)
            return funcol.all_to_all_single(got, None, None, group())

    with fake_ranks(2):
        (gm,) = capture(Sent(), torch.ones(2, 4, WIDTH))
        recognition = recognize(gm.graph)
    assert (recognition.declined, len(recognition.unrelated)) == ((), 2)


# Other ops


def _shard_in(x: Tensor) -> Tensor:
    return torch.ops._dtensor.shard_dim_alltoall(x.contiguous(), 1, 2, group().group_name)


def _shard_out(x: Tensor) -> Tensor:
    return torch.ops._dtensor.shard_dim_alltoall(x.contiguous(), 2, 1, group().group_name)


@torch.library.custom_op("hand_written::ulysses_all_to_all", mutates_args=())
def ulysses_all_to_all(x: Tensor, scatter: int, gather: int) -> Tensor:
    return torch.cat(x.chunk(num_ranks(), dim=scatter), dim=gather)


@ulysses_all_to_all.register_fake
def _(x: Tensor, scatter: int, gather: int) -> Tensor:
    return torch.cat(x.chunk(num_ranks(), dim=scatter), dim=gather)


OTHER_OPS = {
    "_dtensor.shard_dim_alltoall": Layout(each(_shard_in), _shard_out),
    "hand_written.ulysses_all_to_all": Layout(
        each(lambda x: ulysses_all_to_all(x, 2, 1)), lambda x: ulysses_all_to_all(x, 1, 2)
    ),
}


@pytest.mark.parametrize("name", OTHER_OPS)
def test_an_all_to_all_by_another_op_is_declined_by_name(name: str) -> None:
    model = nn.Sequential(Block(heads=HEADS), Block(OTHER_OPS[name], heads=HEADS))
    explanation = _explained(model)
    assert len(explanation.sites) == 1
    reasons = _reasons(explanation)
    assert len(reasons) == 4
    assert all(reason.startswith(f"{name}.default is an all-to-all") for reason in reasons)


def test_another_all_to_all_between_exchange_and_attention_ends_the_way() -> None:
    """The effect of the second exchange is not followed, so no site may be recognized across it."""

    def twice(x: Tensor) -> Tensor:
        return ulysses_all_to_all(ulysses_all_to_all(diffusers_in(x), 2, 1), 1, 2)

    explanation = _explained(Block(Layout(each(twice), diffusers_out), heads=HEADS))
    assert explanation.sites == ()
    assert any("comes from no all-to-all" in reason for reason in _reasons(explanation))


def test_what_counts_as_an_all_to_all() -> None:
    with fake_ranks(NUM_RANKS):
        graph = traced(lambda x: _shard_in(diffusers_in(x) + 1), torch.ones(2, 4, 16, 8))
    (start, other) = [node for node in graph.nodes if is_all_to_all(node)]
    assert is_collective(start) and communicates(start)
    assert communicates(other) and not is_collective(other)
    (added,) = [node for node in graph.nodes if "add" in node.name]
    assert not communicates(added)


# Branches and loops


class InBranch(Block):
    """The exchange of the query, or the whole attention, in a branch of `cond`."""

    whole = False

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        if self.whole:
            attended = torch.cond(flag, self.attention, lambda q, _k, _v: q + 0, (q, k, v))
        else:
            q = torch.cond(flag, diffusers_in, lambda x: diffusers_in(x * 2), (q,))
            attended = diffusers_out(fused(q, diffusers_in(k), diffusers_in(v)))
        return self.finish(attended, x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return diffusers_out(fused(diffusers_in(q), diffusers_in(k), diffusers_in(v))).contiguous()


@pytest.mark.parametrize("whole", [True, False])
def test_an_exchange_in_a_branch_is_declined(whole: bool) -> None:
    model = InBranch(heads=HEADS)
    model.whole = whole
    explanation = _explained(model, torch.tensor(True))
    assert explanation.sites == ()
    assert "lies inside of cond" in _reasons(explanation)[0]
