# SPDX-License-Identifier: Apache-2.0
"""Ops without a schema (`cond`, loops, `flex_attention`) near exchanges: left as they are, never a
crash of any pass, cost or dump.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

from cocodiff_compile import explain
from cocodiff_compile.compiler.generated_order import graph_kinds
from cocodiff_compile.cost.ops import heavy_seconds
from cocodiff_compile.ir.aten import attention_operands, is_heavy
from cocodiff_compile.ir.attention_ops import is_attention
from cocodiff_compile.lab.simulate.program import graph_program, simulated_costs
from cocodiff_compile.lab.simulate.run import DEVICES
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.recognize.attention_cores import find_attention_cores
from cocodiff_compile.topology.presets import PRESETS
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import WIDTH, Block, fused

NUM_RANKS = 4
HEADS = 16
ALL_PASSES = {"head_chunks": 2, "token_chunks": 2, "tapa": "on", "topology": "aurora"}
OPTIONS = {"all passes": ALL_PASSES, "V-Major": {"v_major": {"only_if_faster": False}}}


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Adds the index of the head, which differs from rank to rank, to every score."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, score_mod=lambda score, _b, h, _i, _j: score + h).transpose(1, 2)


class Flex(nn.Module):
    """Two Ulysses attentions, the second by flex_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(heads=HEADS), Block(attend=flex, heads=HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("options", OPTIONS)
def test_flex_attention_is_not_cut_into_chunks_and_else_as_any_other(
    options: str, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    with fake_ranks(NUM_RANKS):
        given = {**OPTIONS[options], "debug_dir": tmp_path}
        explanation = explain(Flex(), torch.ones(2, 8, WIDTH), options=given)
    (graph,) = explanation.graphs
    fused_legs, flex_legs = (list(site["legs"]) for site in graph.summary["sites"])
    reasons = [item.reason for item in explanation.declined if "flex_attention" in item.reason]
    if options == "V-Major":
        assert not reasons
        return
    assert {leg["chunks"] for leg in fused_legs} == {2, 4}
    assert {leg["chunks"] for leg in flex_legs} == {1}
    assert {len(leg["phases"]) for leg in flex_legs} == {2}
    assert len(reasons) == 2  # of heads, and of tokens
    assert "may look at the places of its heads" in reasons[0]


def test_a_local_flex_attention_is_nobodys_business() -> None:
    class Local(Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.reference(x)

    with fake_ranks(NUM_RANKS):
        (gm,) = capture(Local(attend=flex, heads=HEADS), torch.ones(2, 8, WIDTH))
        recognition = recognize(gm.graph)
    assert (recognition.sites, recognition.declined, recognition.unrelated) == ((), (), ())


def test_flex_attention_is_an_attention_that_costs_what_others_cost() -> None:
    """Both have the same operands; flex attention also returns statistics of its scores."""
    device = DEVICES["h100"]
    seconds, kinds = {}, {}
    for name, attend in (("flex", flex), ("fused", fused)):
        with fake_ranks(NUM_RANKS):
            (gm,) = capture(Block(attend=attend, heads=HEADS), torch.ones(2, 256, WIDTH))
        (core,) = find_attention_cores(gm.graph)
        (node,) = core.nodes
        assert is_heavy(node) and is_attention(node.target)
        assert [operand.node for operand in (core.q, core.k, core.v)] == [*attention_operands(node)]
        seconds[name] = heavy_seconds(node, device)
        kinds[name] = graph_kinds(gm.graph)
        costs = simulated_costs(device, PRESETS["aurora"](NUM_RANKS), [gm.graph])
        tasks = graph_program(gm.graph, costs).tasks
        assert [task.seconds for task in tasks if task.work == "attention"] == [seconds[name]]
    assert seconds["flex"] == pytest.approx(seconds["fused"], rel=0.1)
    assert len(kinds["flex"]) == len(kinds["fused"])


def _loop(x: Tensor) -> Tensor:
    halved = while_loop(
        lambda step, _: step < 3, lambda step, x: (step + 1, x * 0.5), (torch.tensor(0), x)
    )
    return halved[1]


HIGHER_ORDER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cond": lambda x, flag: torch.cond(flag, lambda x: x + 1, lambda x: x * 2, (x,)),
    "while_loop": lambda x, _: _loop(x),
    "scan": lambda x, _: scan(lambda c, y: (c + y, c * y), x[0].contiguous(), x.contiguous())[1],
    "associative_scan": lambda x, _: associative_scan(
        lambda a, b: a + b, x.contiguous(), 1, combine_mode="generic"
    ),
}
PLACES = ("tokens", "projected", "entered", "attended", "left")


class Steps(Block):
    """A Ulysses attention with a higher-order op at one place."""

    def __init__(self, place: str, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(heads=HEADS)
        self.place, self.op = place, op

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:  # type: ignore[override]
        def at(place: str, *tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.op(y, flag) for y in tensors) if place == self.place else tensors

        (x,) = at("tokens", x)
        qkv = at("entered", *self.layout.enter(at("projected", *self.project(x))))
        (attended,) = at("attended", self.attend(*qkv))
        (left,) = at("left", self.layout.leave(attended).contiguous())
        return self.finish(left, x)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            name,
            options,
            marks=() if (name, options) == ("cond", "all passes") else pytest.mark.slow,
        )
        for name in HIGHER_ORDER
        for options in OPTIONS
    ],
)
def test_no_pass_trips_over_a_higher_order_op(name: str, options: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {**OPTIONS[options], "debug_dir": tmp_path}
    for place in PLACES:
        torch._dynamo.reset()
        with fake_ranks(NUM_RANKS):
            model = Steps(place, HIGHER_ORDER[name])
            explanation = explain(model, torch.ones(2, 8, WIDTH), torch.tensor(True), options=given)
        declined = [item.reason for item in explanation.declined]
        assert len(explanation.graphs) == 1
        assert len(explanation.sites) == 1 or declined, place
