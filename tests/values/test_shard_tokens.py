# SPDX-License-Identifier: Apache-2.0
"""shard-tokens on simulated ranks: plain models give on every rank what one process computes."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from cocodiff_compile.compat import FakeTensorMode
from cocodiff_compile.cut.cut import Cut, CutUnknown
from cocodiff_compile.decide.shared_nodes import Sharing, why_not_shared
from cocodiff_compile.ir.aten import ALL_GATHER, aten, value_of
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.lab.coverage.examine import sharded_copy
from cocodiff_compile.lab.distances import largest, largest_relative_error
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.shard.shares import AttentionMode, shared
from cocodiff_compile.shard.whole_of_shares import WHOLE, share_of
from tests.support.captured import capture_call, fake_ranks
from tests.support.hand_written import WIDTH, Block
from tests.support.lockstep import machine, machine_groups
from tests.support.plain_dits import PLAIN

MODELS = {
    "flux": {"Ulysses": 2},
    "sd3": {"Ulysses": 1},
    "wan": {"Ulysses": 1, "cross": 1},
    "hunyuan-video": {"Ulysses": 3},
    "qwen-image": {"Ulysses": 1},
}
"""How the attentions of a model with a layer of each kind are computed."""


def _sharded(gm: GraphModule, num_ranks: int) -> tuple[GraphModule, Sharing, Recognition]:
    ours, sharing = sharded_copy(gm, num_ranks)
    return ours, sharing, recognize(ours.graph)


def _largest_error(ours: GraphModule, gm: GraphModule, values: list[Any], num_ranks: int) -> float:
    """Returns the largest error of any rank, relative to the largest value."""
    groups = machine_groups("0", machine(num_ranks))
    inputs = [[*values, torch.tensor([rank])] for rank in range(num_ranks)]
    (expected,) = run_lockstep(gm.graph, [values], {})
    return largest(
        largest_relative_error(_tensors(results), _tensors(expected))
        for results in run_lockstep(ours.graph, inputs, groups)
    )


def _tensors(results: tuple[Any, ...]) -> list[Tensor]:
    return [item for item in results if isinstance(item, Tensor)]


def _modes(sharing: Sharing) -> dict[str, int]:
    return dict(Counter(step.mode.value for step in sharing.steps.values() if step.mode))


@functools.cache
def _model(name: str, heads: int, **tokens: int) -> tuple[GraphModule, list[Any]]:
    small = SMALL_MODELS[name]
    with fake_ranks(4):
        model = small.build(num_layers=1, heads=heads, head_size=16)
        return capture_call(model, **small.inputs(model, **tokens))


CASES = [(8, 64, 16, 4), (6, 45, 23, 4), (6, 64, 16, 3)]
"""Heads, tokens of the image, tokens of the text, ranks."""


@pytest.mark.parametrize(
    ("name", "heads", "image", "text", "ranks"),
    [
        pytest.param(
            name, *case, marks=() if (name, case) == ("flux", CASES[1]) else pytest.mark.slow
        )
        for name in MODELS
        for case in CASES
    ],
)
def test_a_plain_model_becomes_ulysses(
    name: str, heads: int, image: int, text: int, ranks: int
) -> None:
    gm, values = _model(name, heads, image_tokens=image, text_tokens=text)
    with fake_ranks(ranks):
        ours, sharing, recognition = _sharded(gm, ranks)
    assert _modes(sharing) == MODELS[name]
    assert len(recognition.sites) == MODELS[name]["Ulysses"]
    assert not recognition.declined
    assert sum(node.target is ALL_GATHER for node in ours.graph.nodes) <= 2
    assert _largest_error(ours, gm, values, ranks) < 1e-5


@pytest.mark.parametrize("name", PLAIN)
def test_models_of_ones_own_become_ulysses(name: str) -> None:
    plain = PLAIN[name]
    torch.manual_seed(0)
    with fake_ranks(4):
        gm, values = capture_call(plain.build().eval(), *plain.inputs())
        ours, sharing, recognition = _sharded(gm, 4)
    assert _modes(sharing) == plain.modes
    assert len(recognition.sites) == plain.modes.get("Ulysses", 0)
    assert _largest_error(ours, gm, values, 4) < 1e-5


def test_another_rank_has_another_share() -> None:
    """The number of the rank matters: with a wrong one the result is wrong."""
    plain = PLAIN["class-conditional"]
    with fake_ranks(4):
        gm, values = capture_call(plain.build().eval(), *plain.inputs())
        ours, _, _ = _sharded(gm, 4)
    groups = machine_groups("0", machine(4))
    inputs = [[*values, torch.tensor([max(0, rank - 1)])] for rank in range(4)]
    (expected,) = run_lockstep(gm.graph, [values], {})
    wrong = run_lockstep(ours.graph, inputs, groups)
    assert not torch.allclose(wrong[0][0], expected[0], atol=1e-2)


def _attended(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4).unbind()
    return x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("group", "num_ranks", "is_taken"), [("0", 4, True), ("columns", 4, False), ("0", 2, False)]
)
def test_a_block_takes_shares_of_its_own_ranks_only(
    group: str, num_ranks: int, is_taken: bool
) -> None:
    x, weight = torch.randn(2, 16, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    cut = Cut.over_ranks(1, 1, (16,), num_ranks)
    shares = [share_of(x, cut, rank % num_ranks) for rank in range(4)]

    def block(share: Tensor, weight: Tensor) -> Tensor:
        return _attended(WHOLE(share, 1, 1, [16], num_ranks, group), weight)

    with torch.no_grad(), fake_ranks(4):
        gm = make_fx(block, tracing_mode="fake")(shares[0], weight)
        gm.graph.eliminate_dead_code()
        ours, sharing, _ = _sharded(gm, 4)
    gathers = ours.graph.find_nodes(op="call_function", target=WHOLE)
    assert _modes(sharing) == {"Ulysses": 1}
    assert bool(gathers) is not is_taken
    inputs = [[share, weight, torch.tensor([rank])] for rank, share in enumerate(shares)]
    groups = machine_groups("0", machine(4))
    for (actual,) in run_lockstep(ours.graph, inputs, groups, dict.fromkeys(gathers, [x] * 4)):
        torch.testing.assert_close(actual, _attended(x, weight))


def test_what_is_made_on_another_device_is_moved_as_a_whole() -> None:
    """Pipelines make positions on the CPU, and models move them."""

    def model(places: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        moved = aten._to_copy(torch.cat([places.sin(), places.cos()], -1), device=x.device)
        q, k, v = ((x + moved) @ weight).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = aten._scaled_dot_product_flash_attention(q, k, v)[0]
        return x + attended.transpose(1, 2).flatten(2)

    cuda = {"device": "cuda:0", "dtype": torch.bfloat16}
    with torch.no_grad(), fake_ranks(4), FakeTensorMode():
        given = torch.empty(2, 64, 32, **cuda), torch.empty(32, 96, **cuda)
        gm = make_fx(model, tracing_mode="fake")(torch.empty(1, 64, 16), *given)
        gm.graph.eliminate_dead_code()
        ours, sharing, _ = _sharded(gm, 4)
    (moved,) = (node for node in gm.graph.nodes if node.target is aten._to_copy.default)
    assert "moved" in sharing.refused[moved]
    assert _modes(sharing) == {"Ulysses": 1}
    taken = ours.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    assert taken
    read = {value_of(item).device.type for node in taken for item in node.all_input_nodes}
    assert read == {"cuda"}


def test_a_model_that_exchanges_already_is_left_as_it_is() -> None:
    with fake_ranks(4):
        gm, _ = capture_call(Block().eval(), torch.randn(1, 8, WIDTH))
    assert why_not_shared(gm.graph) == "the model exchanges tokens itself"


def _picked(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    q = x.unflatten(-1, (8, -1)).transpose(0, 1)[None]
    return functional.scaled_dot_product_attention(q, q * 2, q * 3), x[keep] * 2


def test_sizes_that_depend_on_values_are_declined() -> None:
    with fake_ranks(4), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm, _ = capture_call(_picked, torch.randn(16, WIDTH), torch.arange(16) > 3)
    assert any(is_attention(node.target) for node in gm.graph.nodes)
    assert why_not_shared(gm.graph) == "sizes depend on values"


def test_an_attention_that_reads_more_than_its_roles_is_not_shared_out() -> None:
    """Nobody says whether an operand that no entry names holds all heads or some of them."""
    graph = torch.fx.Graph()
    query, key, value, other = (graph.placeholder(name) for name in ("q", "k", "v", "other"))
    for node in (query, key, value, other):
        node.meta["val"] = torch.empty(1, 8, 16, 4)
    target = torch.ops.aten._scaled_dot_product_attention_math.default
    plain = graph.call_function(target, (query, key, value))
    wider = graph.call_function(target, (query, key, value), {"dropout_mask": other})
    for node in (plain, wider):
        node.meta["val"] = (torch.empty(1, 8, 16, 4), torch.empty(1, 8, 16, 16))
    cut = Cut.over_ranks(2, 1, (16,), 4)
    keys = {key: cut, value: cut}
    assert shared(plain, cut, keys).mode is AttentionMode.ULYSSES
    with pytest.raises(CutUnknown, match="reads more than query, key, value and mask"):
        shared(wider, cut, keys)
