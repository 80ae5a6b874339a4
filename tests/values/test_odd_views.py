# SPDX-License-Identifier: Apache-2.0
"""Tests code that people may write around an attention and that moves heads or tokens while sizes
stay the same: values are kept bit for bit on every rank, by declining where a pass does not
understand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from cocodiff_compile.compiler import exact_rows
from cocodiff_compile.compiler.exact_rows import rows_differ
from cocodiff_compile.ir.graph_pass import PassResult
from cocodiff_compile.passes.chunk_heads import ChunkHeads
from cocodiff_compile.passes.chunk_tokens import plan_cuttable
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.passes.split_projections import split_projections
from tests.support import hand_written as hw
from tests.support.captured import capture_call, fake_ranks
from tests.support.decided import in_token_chunks
from tests.support.lockstep import equal_on_every_rank, machine, run_both

RANKS = 2
View = Callable[[Tensor], Tensor]

MOVES_HEADS: dict[str, View] = {
    "padded in front and cut behind": lambda x: F.pad(x, (0, 0, 1, -1)),
    "rolled": lambda x: x.roll(1, 2),
    "picked": lambda x: x[:, :, [3, 0, 2, 1, 5, 4]],
    "picked twice": lambda x: x[:, :, [0, 1, 1, 0, 5, 5]],
    "reversed": lambda x: x.flip(2),
    "averaged": lambda x: x - x.mean(2, keepdim=True),
    "softmax": lambda x: x.softmax(2),
    "joined in another order": lambda x: torch.cat(x.split([2, 4], 2)[::-1], 2),
}
KEEPS_HEADS: dict[str, View] = {
    "tokens padded in front and cut behind": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "tokens rolled": lambda x: x.roll(1, 1),
    "features rolled": lambda x: x.roll(1, 3),
    "squeezed, which drops nothing": lambda x: x.squeeze(2),
    "all dims of one dropped": lambda x: x[None].squeeze().view_as(x),
}


class Viewed(hw.Block):
    """A block whose keys pass a view between their exchange and the attention."""

    def __init__(self, view: View) -> None:
        super().__init__(attend=lambda q, k, v: hw.fused(q, view(k), v))


def _rewritten(
    gm: GraphModule, run: Callable[[Any, Any], PassResult]
) -> tuple[GraphModule, PassResult]:
    ours = GraphModule(gm, copy.deepcopy(gm.graph))
    return ours, run(ours.graph, recognize(ours.graph))


@pytest.mark.parametrize("name", [*MOVES_HEADS, *KEEPS_HEADS])
def test_heads_are_not_cut_across_a_view_that_moves_them(name: str) -> None:
    torch.manual_seed(0)
    model = Viewed((MOVES_HEADS | KEEPS_HEADS)[name]).eval()
    with fake_ranks(RANKS):
        gm, values = capture_call(model, torch.randn(2, 5, hw.WIDTH))
        ours, result = _rewritten(gm, ChunkHeads(2).run)
    assert result.changed == (name in KEEPS_HEADS)
    assert bool(result.declined) == (name in MOVES_HEADS)
    assert equal_on_every_rank(*run_both(ours, gm, values, machine(RANKS)))


class ReadWhole(nn.Module):
    """Tokens that were computed run by run, multiplied as columns."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.block, self.view = hw.Block(), view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.block(x))


def _gram(x: Tensor) -> Tensor:
    return x.transpose(1, 2) @ x


def _gram_of_a_slice(x: Tensor) -> Tensor:
    part = torch.cat((x, x), 2)[:, :, 8:40]
    return part.transpose(1, 2) @ part


@pytest.mark.parametrize("view", [_gram, _gram_of_a_slice])
def test_what_multiplies_joined_tokens_gives_the_same_bits(view: View) -> None:
    torch.manual_seed(0)
    model = ReadWhole(view).eval()
    with fake_ranks(RANKS):
        gm, values = capture_call(model, torch.randn(2, 40, hw.WIDTH))
        ours, result = _rewritten(gm, in_token_chunks(2, rows_differ))
    assert result.changed
    assert equal_on_every_rank(*run_both(ours, gm, values, machine(RANKS)))
    if view is _gram:
        assert _multiplied_strides(ours) == _multiplied_strides(gm)


def _multiplied_strides(gm: GraphModule) -> list[tuple[int, ...]]:
    (bmm,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    return [node.meta["val"].stride() for node in bmm.all_input_nodes]


def test_a_product_of_joined_tokens_is_tried_with_their_new_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are left whole if a library gives other bits where rows lie apart."""
    call = exact_rows._call

    def strided(node: Node, samples: Mapping[Node, Any]) -> Tensor:
        is_apart = node.target is torch.ops.aten.bmm.default and any(
            64 in sample.stride() for sample in samples.values()
        )
        return call(node, samples) * (1 + 1e-6 * is_apart)

    with fake_ranks(RANKS):
        gm, _ = capture_call(ReadWhole(_gram_of_a_slice).eval(), torch.randn(2, 40, hw.WIDTH))
        plan, _ = plan_cuttable(gm.graph, recognize(gm.graph).sites, 2)
        assert rows_differ(plan) == ""
        monkeypatch.setattr(exact_rows, "_call", strided)
        assert "joined again" in rows_differ(plan)


class Scaled(hw.Block):
    """One product for query, key and value, with a scale, a bias and rows of its own."""

    def __init__(self, bias: tuple[int, ...], beta: float, alpha: float) -> None:
        super().__init__()
        inner = 3 * self.heads * hw.HEAD_SIZE
        self.weight = nn.Parameter(torch.randn(hw.WIDTH, inner))
        self.bias = nn.Parameter(torch.randn([inner if size == 0 else size for size in bias]))
        self.scales = {"beta": beta, "alpha": alpha}

    def project(self, x: Tensor) -> hw.QKV:
        rows = torch.addmm(self.bias, x.flatten(0, 1), self.weight, **self.scales)
        parts = rows.unflatten(0, x.shape[:2]).chunk(3, -1)
        return tuple(part.unflatten(-1, (-1, hw.HEAD_SIZE)) for part in parts)


@pytest.mark.parametrize("bias", [(0,), (1,), (1, 0), (10, 0), (10, 1), ()])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, 2.0)])
def test_split_projections_keep_scales_and_biases(
    bias: tuple[int, ...], beta: float, alpha: float
) -> None:
    torch.manual_seed(0)
    model = Scaled(bias, beta, alpha).eval()
    with fake_ranks(RANKS):
        gm, values = capture_call(model, torch.randn(2, 5, hw.WIDTH))
        ours = GraphModule(gm, copy.deepcopy(gm.graph))
        split_projections(ours.graph, recognize(ours.graph))
    assert equal_on_every_rank(*run_both(ours, gm, values, machine(RANKS)))


def test_a_fused_projection_of_one_token_is_split() -> None:
    """Its rows may be squeezed away, so that the parts have fewer dims than the product."""
    torch.manual_seed(0)

    class OneToken(hw.FusedProjection):
        def project(self, x: Tensor) -> hw.QKV:
            parts = self.to_qkv(x).squeeze().chunk(3, -1)
            return tuple(part.view(1, 1, -1, hw.HEAD_SIZE) for part in parts)

    with fake_ranks(RANKS):
        gm, values = capture_call(OneToken().eval(), torch.randn(1, 1, hw.WIDTH))
        ours = GraphModule(gm, copy.deepcopy(gm.graph))
        assert split_projections(ours.graph, recognize(ours.graph)) == 1
    assert equal_on_every_rank(*run_both(ours, gm, values, machine(RANKS)))
