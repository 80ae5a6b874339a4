# SPDX-License-Identifier: Apache-2.0
"""The pipeline: passes in order, rules checked around each, observers see all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch import distributed as dist
from torch.fx import Graph, GraphModule

from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.aten import ALL_TO_ALL, WAIT, emit
from cocodiff_compile.ir.collectives import is_wait
from cocodiff_compile.ir.graph_pass import GraphPass, PassResult
from cocodiff_compile.ir.records import Declined, Recognition
from cocodiff_compile.passes.recognize_ulysses import RecognizeUlysses
from cocodiff_compile.pipeline.run_passes import (
    PassRecord,
    Pipeline,
    PipelineReport,
    Stage,
    broken_rule,
)
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import WIDTH, Block

aten = torch.ops.aten


@pytest.fixture
def gm() -> Iterator[GraphModule]:
    with fake_ranks(4):
        (captured,) = capture(Block(), torch.ones(2, 5, WIDTH))
        yield captured


@dataclass(frozen=True)
class Edit:
    """A pass that does what a function does."""

    name: str
    edit: Callable[[Graph], object]
    changed: bool = True

    def run(self, graph: Graph, _recognition: Recognition) -> PassResult:
        self.edit(graph)
        return PassResult(changed=self.changed)


@dataclass
class Watcher:
    """Writes down what an observer is shown."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    def captured(self, module: GraphModule) -> None:
        self.seen.append(("captured", _code_of(module)))

    def after_pass(self, name: str, module: GraphModule, _result: PassResult) -> None:
        self.seen.append((name, _code_of(module)))


def _code_of(module: GraphModule) -> str:
    code: str = module.graph.python_code(root_module="self").src
    return code


def _first(graph: Graph, target: object) -> torch.fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def _last(graph: Graph) -> torch.fx.Node:
    """Returns the node whose value the model returns."""
    return graph.output_node().all_input_nodes[0]


def _drop_wait(graph: Graph) -> None:
    wait = next(node for node in graph.nodes if is_wait(node))
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    graph.erase_node(wait)


def _insert_without_value(graph: Graph) -> None:
    last = _last(graph)
    with graph.inserting_after(last):
        bare = graph.call_function(aten.relu.default, (last,))
    last.replace_all_uses_with(bare, delete_user_cb=lambda user: user is not bare)


def _use_before_definition(graph: Graph) -> None:
    first_call = next(node for node in graph.nodes if node.op == "call_function")
    first_call.prepend(_last(graph))


def _insert_relu(graph: Graph) -> None:
    last = _last(graph)
    with graph.inserting_after(last):
        relu = emit(graph, aten.relu.default, last, like=last)
    last.replace_all_uses_with(relu, delete_user_cb=lambda user: user is not relu)


def _insert_dead_code(graph: Graph) -> None:
    last = _last(graph)
    with graph.inserting_after(last):
        emit(graph, aten.sigmoid.default, last, like=last)


def run_passes(
    gm: GraphModule, *passes: GraphPass, observers: tuple[Watcher, ...] = ()
) -> PipelineReport:
    return Pipeline(tuple(map(Stage.of, passes)), observers).run(gm)


def _nothing(_graph: Graph) -> None:
    return None


BREAKING = [
    ("drop-wait", _drop_wait, "all_to_all_single.* is never waited for"),
    ("insert-without-value", _insert_without_value, "relu.* has no value"),
    ("use-before-definition", _use_before_definition, "lint"),
]
every_break = pytest.mark.parametrize(
    ("name", "edit", "words"), BREAKING, ids=[item[0] for item in BREAKING]
)


@every_break
def test_pass_that_breaks_a_rule_is_named(
    gm: GraphModule, name: str, edit: Callable[[Graph], None], words: str
) -> None:
    later = Watcher()
    passes = (Edit("good", _insert_relu), Edit(name, edit), Edit("after", _nothing))
    with pytest.raises(InvariantError, match=f"(?s)pass '{name}' broke the graph: .*{words}"):
        run_passes(gm, *passes, observers=(later,))
    assert [name for name, _ in later.seen] == ["captured", "good"]


@every_break
def test_pass_that_hides_its_change_is_caught_too(
    gm: GraphModule, name: str, edit: Callable[[Graph], None], words: str
) -> None:
    with pytest.raises(InvariantError, match=f"(?s)pass '{name}' broke the graph: .*{words}"):
        run_passes(gm, Edit(name, edit, changed=False))


@every_break
def test_graph_that_comes_in_broken_is_refused_and_untouched(
    gm: GraphModule, name: str, edit: Callable[[Graph], None], words: str
) -> None:
    edit(gm.graph)
    before = str(gm.graph)
    watcher = Watcher()
    report = run_passes(gm, Edit(name, _insert_relu), RecognizeUlysses(), observers=(watcher,))
    assert report.refused
    assert words.rsplit(".*", maxsplit=1)[-1] in report.refused
    assert (report.passes, report.declined, report.recognition.sites) == ((), (), ())
    assert str(gm.graph) == before
    assert [name for name, _ in watcher.seen] == ["captured"]


def test_observers_see_the_captured_graph_and_each_pass_in_order(gm: GraphModule) -> None:
    watcher, other = Watcher(), Watcher()
    code = gm.code
    passes = (RecognizeUlysses(), Edit("first", _insert_relu), Edit("second", _nothing, False))
    report = run_passes(gm, *passes, observers=(watcher, other))
    assert [name for name, _ in watcher.seen] == [
        "captured",
        "recognize-ulysses",
        "first",
        "second",
    ]
    assert other.seen == watcher.seen
    assert [record.name for record in report.passes] == ["recognize-ulysses", "first", "second"]
    codes = [text for _, text in watcher.seen]
    assert codes[0] == codes[1] == code
    assert codes[2] == codes[3] == gm.code
    assert "aten.relu" in codes[2]


def test_dead_code_is_dropped_after_a_changing_pass(gm: GraphModule) -> None:
    before = gm.code
    run_passes(gm, Edit("insert-dead-code", _insert_dead_code))
    assert gm.code == before
    assert not gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default)


def test_dead_code_elimination_keeps_collectives(gm: GraphModule) -> None:
    run_passes(gm, Edit("insert-relu", _insert_relu))
    assert len(gm.graph.find_nodes(op="call_function", target=ALL_TO_ALL)) == 4
    assert len(gm.graph.find_nodes(op="call_function", target=WAIT)) == 4


def test_recognition_changes_nothing(gm: GraphModule) -> None:
    code, graph = gm.code, str(gm.graph)
    report = run_passes(gm, RecognizeUlysses(), RecognizeUlysses())
    assert (gm.code, str(gm.graph)) == (code, graph)
    assert not any(record.result.changed for record in report.passes)
    assert len(report.recognition.sites) == 1


def test_changed_graph_is_recompiled(gm: GraphModule) -> None:
    run_passes(gm, Edit("insert-relu", _insert_relu))
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = [torch.randn(*node.meta["val"].shape) for node in placeholders]
    (result,) = gm(*inputs)
    assert "aten.relu" in gm.code
    assert bool((result >= 0).all())


def test_report_without_recognition_is_empty(gm: GraphModule) -> None:
    report = run_passes(gm)
    assert (report.passes, report.refused, report.declined) == ((), "", ())
    assert report.recognition.sites == ()


def test_report_holds_the_last_recognition_and_the_declines_of_all_passes(gm: GraphModule) -> None:
    node = _last(gm.graph)
    early, late, own = (Declined(node, reason) for reason in ("early", "late", "own"))
    results = [
        PassResult(changed=False, recognition=Recognition(declined=(early,))),
        PassResult(changed=True, recognition=Recognition(declined=(late,), unrelated=(node,))),
        PassResult(changed=False, declined=(own,)),
    ]
    report = PipelineReport(tuple(PassRecord("some", result, 0.0) for result in results))
    assert report.recognition is results[1].recognition
    assert report.declined == (late, own)


def test_an_earlier_recognition_is_let_go(gm: GraphModule) -> None:
    report = run_passes(gm, RecognizeUlysses(), RecognizeUlysses())
    first, second = report.passes
    assert first.result.recognition is None
    assert report.recognition is second.result.recognition
    assert len(report.recognition.sites) == 1


def _gather_two(x: Tensor) -> Tensor:
    first, second = funcol.all_gather_into_tensor_coalesced([x, x * 2], dist.group.WORLD)
    return first + second


def test_collectives_of_several_tensors_are_waited_for_by_their_parts() -> None:
    with fake_ranks(4):
        (captured,) = capture(_gather_two, torch.ones(2, 3))
        assert broken_rule(captured.graph) == ""
        while any(map(is_wait, captured.graph.nodes)):
            _drop_wait(captured.graph)
        assert "coalesced" in broken_rule(captured.graph)
        assert "is never waited for" in broken_rule(captured.graph)
