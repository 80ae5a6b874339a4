# SPDX-License-Identifier: Apache-2.0
"""Problems of a page: what was planted is named, with its reason and a remedy that is its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cocodiff_compile
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.report.problems import Problem, find_problems
from cocodiff_compile.report.remedies import GENERAL, remedy_for
from tests.support import hand_written as hw
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written_declined import NEAR_MISSES, NearMiss
from tests.support.hand_written_more_declined import MORE_NEAR_MISSES
from tests.support.planted import ODD_NAME, SLOW, explain_planted


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (graph,) = explain_planted(tmp_path_factory.mktemp("planted")).graphs
    assert graph.page is not None
    page: dict[str, Any] = json.loads(json.dumps(graph.page))
    return page


def _explained(model: nn.Module, folder: Path, tokens: int = 5, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    (folder / "slow.yaml").write_text(SLOW)
    with fake_ranks(4):
        explanation = cocodiff_compile.explain(
            model.eval(),
            torch.ones(2, tokens, hw.WIDTH),
            options={"topology": str(folder / "slow.yaml"), **options},
        )
    (graph,) = explanation.graphs
    assert graph.page is not None
    return graph.page


def _of_kind(page: Mapping[str, Any], kind: str) -> list[Problem]:
    return [item for item in find_problems(page) if item.kind == kind]


def test_the_declined_attention_comes_first_with_the_call_that_makes_it_known(
    planted: dict[str, Any],
) -> None:
    first, *_ = find_problems(planted)
    assert (first.severity, first.kind) == ("error", "attention declined")
    assert ODD_NAME in first.where
    assert "hand_written.opaque_attention" in first.reason
    (remedy,) = first.remedies
    call = "cocodiff_compile.register_attention(torch.ops.hand_written.opaque_attention.default, "
    assert f"{call}query='q', key='k', value='v', layout=" in remedy


def test_an_exposed_exchange_is_named_with_its_time_and_what_may_hide_it(
    planted: dict[str, Any],
) -> None:
    exposed = [item for item in _of_kind(planted, "exchange exposed") if item.cost_s]
    first = next(item for item in exposed if item.where.startswith("first"))
    assert all(f"{role} " in first.title for role in "QKVO")
    assert "nothing that could run meanwhile is left" in first.reason
    step_s = planted["final"]["step_ns"] / 1e9
    assert 0.3 * step_s < first.cost_s < step_s
    assert "faster links" in first.remedies[0], "the wire is what limits"
    assert any("'head_chunks': 3" in item for item in first.remedies), "a rank has 3 heads"
    assert exposed == sorted(exposed, key=lambda item: -item.cost_s)


def test_packed_exchanges_are_to_be_parted(tmp_path: Path) -> None:
    page = _explained(hw.Block(hw.STACKED), tmp_path)
    assert page["summary"]["sites"][0]["packed"]
    (exposed, *_) = _of_kind(page, "exchange exposed")
    assert any("Exchange Q, K and V each by itself" in item for item in exposed.remedies)


def test_an_order_that_takes_too_much_memory_is_a_note(tmp_path: Path) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = hw.Block(), hw.Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.one(x) + self.other(x)
            return out

    page = _explained(Parallel(), tmp_path, tokens=64, topology="flat")
    (note,) = _of_kind(page, "pass declined")
    assert note.severity == "note"
    assert "times the memory: left as captured" in note.reason
    assert "memory alive" in note.remedies[0]


def test_turned_off_ordering_is_told(tmp_path: Path) -> None:
    page = _explained(hw.Block(), tmp_path, v_first=False)
    assert page["final"] is None
    (problem,) = _of_kind(page, "no order")
    assert "schedule-v-first is turned off" in problem.reason
    assert "'v_first': True" in problem.remedies[0]


def test_a_lost_order_and_a_refused_graph_come_before_all_else(planted: dict[str, Any]) -> None:
    assert find_problems({**planted, "lost_order": True})[0].kind == "order not kept"
    summary = {**planted["summary"], "refused": "the captured graph cannot be worked on"}
    assert find_problems({**planted, "summary": summary})[0].kind == "graph left to Inductor"


def test_a_graph_without_exchanges_is_pointed_to_the_option_that_makes_them(tmp_path: Path) -> None:
    page = _explained(nn.Linear(hw.WIDTH, 4), tmp_path)
    (problem,) = find_problems(page)
    assert "'shard': 'tokens'" in problem.remedies[0]


def test_blocks_that_are_alike_are_one_problem(planted: dict[str, Any]) -> None:
    item = {"node": "n", "reason": "unequal splits [4, 4]", "module": ""}
    many = [{**item, "module": f"blocks.{n}.attn", "node": f"n_{n}"} for n in range(57)]
    summary = {**planted["summary"], "declined": many}
    (problem,) = _of_kind({**planted, "summary": summary}, "attention declined")
    assert (problem.count, problem.where.split(" ")[0]) == (57, "blocks.0-56.attn")
    assert "Pad tokens and heads" in problem.remedies[0]


@pytest.mark.parametrize("miss", [*NEAR_MISSES, *MORE_NEAR_MISSES], ids=str)
def test_every_near_miss_has_a_remedy_of_its_own(miss: NearMiss) -> None:
    with fake_ranks(miss.num_ranks):
        (gm,) = capture(miss.build(), *miss.arguments())
        declined = recognize(gm.graph).declined
    for item in declined:
        assert remedy_for(item.reason) != GENERAL, item.reason
