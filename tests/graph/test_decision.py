# SPDX-License-Identifier: Apache-2.0
"""Decisions: printed, saved, given back without a search, refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cocodiff_compile
from cocodiff_compile.compiler import compile_graph, stages
from cocodiff_compile.compiler.explain import Explanation
from cocodiff_compile.decide.decision import Decision, ExchangePhases
from cocodiff_compile.decide.decision_file import (
    GivenDecisions,
    GraphDecision,
    load_decisions,
    write_decisions,
)
from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.presets import PRESETS
from tests.support.captured import fake_ranks
from tests.support.hand_written import WIDTH, Block

SLOW: dict[str, Any] = {
    "name": "slow",
    "copy_bytes_per_s": 1e10,
    "links": {
        "pcie": {"bytes_per_s": 2e10, "latency_s": 1e-6},
        "wire": {"bytes_per_s": 2e8, "latency_s": 1e-6, "unaligned_from_bytes": 1},
    },
    "axes": [
        {"name": "gpu", "size": 2, "link": "pcie"},
        {"name": "node", "size": 2, "link": "wire"},
    ],
}
"""A machine on which phases, chunks and another order pay."""

CODED = {"policy": "fixed", "only_if_faster": False}


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks(4):
        yield


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "slow.json").write_text(json.dumps(SLOW))
    return {"topology": str(tmp_path / "slow.json")}


def explained(options: dict[str, Any], tokens: int = 512) -> Explanation:
    torch._dynamo.reset()
    model = nn.Sequential(Block(), Block()).eval()
    return cocodiff_compile.explain(model, torch.ones(1, tokens, WIDTH), options=options)


def graphs_left(options: dict[str, Any], folder: Path) -> list[str]:
    """Returns the text of the last dump of the graph, and of each kind of step made of it."""
    explained({**options, "debug_dir": folder})
    last = {dump.parent: dump for dump in sorted(folder.rglob("*.py"))}
    return [dump.read_text().split("\n", 1)[1] for dump in last.values()]


def test_what_is_decided_is_printed(options: dict[str, Any]) -> None:
    explanation = explained(options)
    (graph,) = explanation.graphs
    decision = graph.report.decision
    assert decision.order is not None
    assert decision.is_phased
    assert max(decision.head_chunks) > 1
    assert "decided: projections" in str(explanation)
    assert "order new" in str(explanation)
    assert graph.summary["decision"]["phases"] in str(explanation)


def test_a_saved_decision_is_read_as_it_was(options: dict[str, Any], tmp_path: Path) -> None:
    graphs = explained(options).graphs
    cocodiff_compile.save_decisions(graphs, tmp_path / "decisions.json")
    held = load_decisions(tmp_path / "decisions.json")
    assert held.kinds_of(graphs[0].report.fingerprint) == {"exact": graphs[0].report.decision}
    assert held.kinds_of("another") == {}


def _fails(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("something was searched for, or measured")


SEARCHES = [
    (stages, "choose_unfused"),
    (stages, "choose_head_chunks"),
    (stages, "choose_token_chunks"),
    (stages, "choose_phases"),
    (stages, "choose_order"),
    (stages, "choose_uncoded"),
    (compile_graph, "choose_uncoded"),
    (compile_graph, "find_device"),
]


@pytest.mark.parametrize("v_major", [None, CODED], ids=["exact", "coded"])
def test_a_given_decision_makes_the_same_graph_without_a_search(
    v_major: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "v_major": v_major}
    before = graphs_left(options, tmp_path / "before")
    (decided,) = explained(options).graphs
    cocodiff_compile.save_decisions([decided], tmp_path / "decisions.json")
    for module, name in SEARCHES:
        monkeypatch.setattr(module, name, _fails)
    given = {**options, "decision": tmp_path / "decisions.json"}
    assert graphs_left(given, tmp_path / "after") == before
    (graph,) = explained(given).graphs
    assert graph.report.decision == decided.report.decision
    assert graph.report.is_ordered == decided.report.is_ordered
    with pytest.raises(Exception, match="something was searched for"):
        explained(options)


def test_another_option_than_the_decision_was_made_with_is_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    cocodiff_compile.save_decisions(explained(options).graphs, tmp_path / "decisions.json")
    with pytest.raises(UserError, match="option 'head_chunks' \"'auto'\", and this is '2'"):
        explained({**options, "decision": tmp_path / "decisions.json", "head_chunks": 2})


def test_a_graph_that_is_not_held_is_decided_anew_and_that_is_said(
    options: dict[str, Any], tmp_path: Path, said: Callable[[str], int]
) -> None:
    cocodiff_compile.save_decisions(explained(options).graphs, tmp_path / "decisions.json")
    given = {**options, "decision": tmp_path / "decisions.json"}
    (graph,) = explained(given, tokens=256).graphs
    assert said("holds no decision for a graph") == 1
    assert graph.report.estimate is not None


def test_a_kind_of_step_that_is_not_held_is_left_as_captured(
    options: dict[str, Any], tmp_path: Path, said: Callable[[str], int]
) -> None:
    options = {**options, "v_major": CODED}
    (graph,) = explained(options).graphs
    report = replace(graph.report, kind="8 bits")
    file = tmp_path / "decisions.json"
    cocodiff_compile.save_decisions([replace(graph, report=report)], file)
    (again,) = explained({**options, "decision": file}).graphs
    assert said("no decision for steps of the kind '4 bits'") == 1
    assert again.report.decision.head_chunks == graph.report.decision.head_chunks
    assert again.report.decision.order is None
    assert not again.report.decision.is_phased


def test_a_dry_run_does_not_decide_for_ranks_that_run(
    options: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "decisions.json"
    cocodiff_compile.save_decisions(explained(options).graphs, file)
    model = nn.Sequential(Block(), Block()).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="cocodiff_eager", options={**options, "decision": file})
    with torch.no_grad(), pytest.raises(UserError, match="the compile 'a dry run'"):
        compiled(torch.ones(1, 512, WIDTH))


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "head chunks": ({"head_chunks": (2,)}, "2 attentions"),
    "token chunks": ({"token_chunked": (0, 7)}, "2 attentions"),
    "uncoded": ({"uncoded": ("", "", "")}, "2 attentions"),
    "order": ({"order": (1, 0)}, "another graph"),
    "groups": ({"topologies": (PRESETS["flat"](4),) * 2}, "1 Ulysses groups"),
    "axes": (
        {"phases": (ExchangePhases(0, 64, (("gpu",), ("gpu",))),)},
        "no phases gpu | gpu on its machine",
    ),
    "sizes": ({"phases": (ExchangePhases(0, 64, (("gpu",), ("node",))),)}, "no phases are given"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_decision_that_does_not_fit_the_graph_is_refused(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    change, words = MISFITS[name]
    (graph,) = explained(options).graphs
    decision = replace(graph.report.decision, **change)
    report = replace(graph.report, decision=decision)
    file = tmp_path / "decisions.json"
    cocodiff_compile.save_decisions([replace(graph, report=report)], file)
    with pytest.raises(UserError, match="option 'decision'") as refused:
        explained({**options, "decision": file})
    assert words in str(refused.value)


def test_a_file_that_could_not_be_read_again_is_not_written(
    options: dict[str, Any], tmp_path: Path
) -> None:
    graphs = explained(options).graphs
    with pytest.raises(UserError, match=r"must end in \.json"):
        cocodiff_compile.save_decisions(graphs, tmp_path / "decisions")
    with pytest.raises(UserError, match="No such file"):
        cocodiff_compile.save_decisions(graphs, tmp_path / "nowhere" / "decisions.json")


def test_decisions_of_different_options_are_not_saved_together(
    options: dict[str, Any], tmp_path: Path
) -> None:
    graphs = (*explained(options).graphs, *explained({**options, "head_chunks": 1}).graphs)
    with pytest.raises(UserError, match="different options"):
        cocodiff_compile.save_decisions(graphs, tmp_path / "decisions.json")
    with pytest.raises(UserError, match="no decision to save"):
        cocodiff_compile.save_decisions([], tmp_path / "decisions.json")


DECISION = Decision(
    unfused_projections=True,
    head_chunks=(2, 1),
    token_chunks=2,
    token_chunked=(0,),
    uncoded=("", "too small"),
    phases=(ExchangePhases(0, 4096, (("tile",), ("gpu", "node"))),),
    topologies=(PRESETS["aurora"](24),),
    order=(1, 0),
)
HELD = GivenDecisions({"torch": "2"}, (GraphDecision("abc", "exact", DECISION),))


def test_every_field_goes_through_a_file(tmp_path: Path) -> None:
    write_decisions(HELD, tmp_path / "all.json")
    assert load_decisions(tmp_path / "all.json") == HELD
    assert repr(load_decisions(tmp_path / "all.json")) == repr(HELD)
    other = GivenDecisions(HELD.made_with, (GraphDecision("abc", "exact", Decision()),))
    assert repr(other) != repr(HELD)


BROKEN = {
    "no mapping": (lambda _: [], "the file has"),
    "graphs": (lambda data: {**data, "graphs": 3}, "graphs is 3"),
    "made with": (lambda data: {**data, "made_with": {"torch": 2}}, "made_with is"),
    "missing": (lambda _: {"graphs": []}, "needed: made_with, graphs"),
    "unfused": (lambda data: _with(data, "unfused_projections", 1), "unfused_projections is 1"),
    "heads": (lambda data: _with(data, "head_chunks", [0]), "head_chunks is 0"),
    "tokens": (lambda data: _with(data, "token_chunks", "2"), "token_chunks is '2'"),
    "order": (lambda data: _with(data, "order", [0, 0]), "order is no permutation"),
    "order of what": (lambda data: _with(data, "order", [True]), "order is True"),
    "phases": (lambda data: _with(data, "phases", [[1]]), "an entry of phases has"),
    "topology": (lambda data: _with(data, "topologies", [{}]), "needed: name"),
    "uncoded": (lambda data: _with(data, "uncoded", [1]), "uncoded is 1"),
}


def _with(data: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    data["graphs"][0]["decision"][field] = value
    return data


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, words = BROKEN[name]
    file = tmp_path / "broken.json"
    write_decisions(HELD, file)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(UserError, match=r"decision file .*broken\.json: ") as refused:
        explained({"decision": file})
    assert words in str(refused.value)


@pytest.mark.parametrize("value", [3, "", "nowhere.json", b"x"])
def test_what_is_no_file_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="option 'decision' of backend 'cocodiff' is"):
        explained({"decision": value})
