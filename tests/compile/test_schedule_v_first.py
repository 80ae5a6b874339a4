# SPDX-License-Identifier: Apache-2.0
"""schedule-v-first on public models: the order of the graph, and of the code made from it."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from cocodiff_compile.compat import compile_fx_inner
from cocodiff_compile.compiler import compile_graph as compile_module
from cocodiff_compile.compiler import pin_order
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.explain import explain
from cocodiff_compile.compiler.generated_order import code_kinds, graph_kinds, keeps_order
from cocodiff_compile.compiler.stages import Deciding
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.devices.choose import DEVICE_KINDS
from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.ir.aten import MATMUL
from cocodiff_compile.ir.records import Leg, UlyssesSite
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.report.collect import GraphReport, collect_reports
from cocodiff_compile.schedule.graph_tasks import is_anchor
from cocodiff_compile.schedule.peak_memory import peak_bytes
from tests.support.captured import fake_ranks
from tests.support.code_text import text_only
from tests.support.hand_written import HEADS, WIDTH, Block
from tests.support.slow_links import slow_links
from tests.support.traced import traced

MODELS = ("flux", "sd3", "qwen-image", "wan", "flux2")


@dataclass(frozen=True)
class Generated:
    place: dict[Node, int]
    """Where each node stood in the graph, which code generation consumes."""
    kinds: list[str]
    report: GraphReport
    code: str

    @property
    def sites(self) -> tuple[UlyssesSite, ...]:
        return self.report.report.recognition.sites

    def first(self, nodes: Iterable[Node]) -> int:
        return min(self.place[node] for node in nodes)

    def last(self, nodes: Iterable[Node]) -> int:
        return max(self.place[node] for node in nodes)


@functools.cache
def generated(name: str, chunks: int, runs: int) -> Generated:
    """A model as the backend hands it to Inductor, and the code that comes back."""
    small = SMALL_MODELS[name]
    place: dict[Node, int] = {}
    kinds: list[str] = []

    def keep(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        place.update({node: number for number, node in enumerate(gm.graph.nodes)})
        kinds.extend(graph_kinds(gm.graph))
        return compile_fx_inner(gm, *args, **kwargs)

    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder, fake_ranks(2):
        topology = slow_links(Path(folder) / "slow.json")
        options = {"topology": topology, "head_chunks": chunks, "token_chunks": runs}
        options["shard"] = {"min_gain": 0}
        config = CompileConfig.from_options(options)
        model = small.build(num_layers=1, heads=4, head_size=32)
        if runs > 1 and small.num_ulysses_attentions(model) == 1:
            model = small.build(num_layers=2, heads=4, head_size=32)
        inputs = small.inputs(model, image_tokens=128, text_tokens=16)

        def backend(gm: GraphModule, example_inputs: Sequence[object]) -> object:
            return compile_graph(gm, example_inputs, config, keep, dry_run=True)

        with torch.no_grad(), collect_reports() as reports, text_only() as written:
            torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    (report,) = reports
    return Generated(place, kinds, report, written[0])


IN_RUNS = [
    ("flux", 1, 2),
    *(pytest.param(name, 1, 2, marks=pytest.mark.slow) for name in MODELS if name != "flux"),
]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


whole_and_chunked = pytest.mark.parametrize(
    ("name", "chunks", "runs"),
    [*((name, chunks, 1) for name in MODELS for chunks in (1, 2)), *IN_RUNS],
)


@whole_and_chunked
def test_generated_code_keeps_the_order_of_the_graph(name: str, chunks: int, runs: int) -> None:
    made = generated(name, chunks, runs)
    assert made.report.report.is_ordered
    assert made.kinds.count("all_to_all_single") == sum(len(site.pieces) for site in made.sites)
    assert keeps_order(made.code, made.kinds) is True
    assert "matmul" in code_kinds(made.code)


def _starts(leg: Leg) -> list[Node]:
    return [piece.start for piece in leg.exchange.pieces]


def _feeding(leg: Leg) -> list[Node]:
    return [item.node for item in leg.projections]


@whole_and_chunked
def test_v_is_sent_before_q_and_k_are_projected(name: str, chunks: int, runs: int) -> None:
    made = generated(name, chunks, runs)
    for site in made.sites:
        first = made.first(_starts(site.v))
        others = {node for leg in (site.q, site.k) for node in _feeding(leg)}
        for node in others - set(_feeding(site.v)):
            assert first < made.place[node], (site.module_path, node)
        assert first < made.first([*_starts(site.q), *_starts(site.k)])


def test_no_wait_stands_before_the_last_start_of_the_way_in(model: str) -> None:
    made = generated(model, 1, 1)
    for site in made.sites:
        inputs = [leg.exchange for leg in (site.q, site.k, site.v)]
        last_start = made.last(item.start for item in inputs)
        assert last_start < made.first(item.wait for item in inputs)


def test_a_chunk_is_attended_to_while_the_next_is_on_its_way(model: str) -> None:
    made = generated(model, 2, 1)
    for site in made.sites:
        first, second = (
            made.place[node] for node in site.attention.nodes if "attention" in str(node.target)
        )
        inputs = [leg.exchange.chunks[1] for leg in (site.q, site.k, site.v)]
        assert made.last(item.start for item in inputs) < first
        assert first < made.last(item.wait for item in inputs)
        out = [(made.place[item.start], made.place[item.wait]) for item in site.o.exchange.chunks]
        assert first < out[0][0] < second < out[1][0]
        assert second < out[0][1]


@pytest.mark.parametrize(("name", "chunks", "runs"), IN_RUNS)
def test_a_run_of_tokens_is_computed_while_the_other_is_on_its_way(
    name: str, chunks: int, runs: int
) -> None:
    made = generated(name, chunks, runs)
    assert len(made.sites) > 1
    for site, after in itertools.pairwise(made.sites):
        pieces = site.o.exchange.chunks
        first, second = sorted(pieces, key=lambda item: made.place[item.start])
        attended = [node for node in site.attention.nodes if "attention" in str(node.target)]
        assert made.place[first.start] < made.last(attended) < made.place[first.wait]
        behind = [item.node for item in after.v.projections]
        assert made.place[second.wait] < made.last(behind)
        assert made.first(_starts(after.v)) < made.last(behind)


def test_the_way_out_is_waited_for_behind_independent_matmuls() -> None:
    """FLUX's single-stream blocks have an MLP beside their attention."""
    made = generated("flux", 1, 1)
    sites = [site for site in made.sites if "single" in site.module_path]
    assert sites
    for site in sites:
        heavy = [node for node in site.independent if node.target in MATMUL]
        assert heavy
        assert made.last(heavy) < made.place[site.o.exchange.wait]


def test_a_wait_with_nothing_to_hide_behind_says_so(model: str) -> None:
    made = generated(model, 2, 1)
    rows = made.report.summary["schedule"]
    assert rows["after"]["step"] < rows["before"]["step"]
    assert rows["after"]["exposed"] < rows["before"]["exposed"]
    assert len(rows["exchanges"]) == made.kinds.count("wait")


# The report


def test_explain_says_what_is_exposed_and_behind_what_it_hides(tmp_path: Path) -> None:
    options = {"topology": slow_links(tmp_path / "slow.json")}
    torch._dynamo.reset()
    with fake_ranks(2):
        explanation = explain(Block().eval(), torch.ones(1, 64, WIDTH), options=options)
    text = str(explanation)
    assert "exposed ms as captured" in text
    assert "attentions in" in text
    (graph,) = json.loads(explanation.to_json())["graphs"]
    (leg, *_) = graph["sites"][0]["legs"]
    assert leg["chunks"] > 1
    assert graph["schedule"]["after"]["step"] < graph["schedule"]["before"]["step"]


def test_fast_links_leave_the_graph_as_it_was_captured(tmp_path: Path) -> None:
    file = tmp_path / "fast.json"
    links = {"wire": {"bytes_per_s": 1e15, "latency_s": 1e-12}}
    axes = [{"name": "node", "size": 2, "link": "wire"}]
    file.write_text(
        json.dumps({"name": "fast", "copy_bytes_per_s": 1e15, "links": links, "axes": axes})
    )
    torch._dynamo.reset()
    with fake_ranks(2):
        explanation = explain(
            Block().eval(), torch.ones(1, 8, WIDTH), options={"topology": str(file)}
        )
    (graph,) = explanation.graphs
    assert not graph.report.is_ordered
    assert not any(record.result.changed for record in graph.report.passes)


def test_an_order_that_takes_too_much_memory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"topology": slow_links(tmp_path / "slow.json"), "head_chunks": 1}
    little = functools.partial(Deciding, limits=Limits(order_memory=0.1))
    monkeypatch.setattr(compile_module, "Deciding", little)
    torch._dynamo.reset()
    with fake_ranks(2):
        explanation = explain(Block().eval(), torch.ones(1, 64, WIDTH), options=options)
    (graph,) = explanation.graphs
    record = graph.report.passes[-1]
    assert record.name == "schedule-v-first"
    assert "times the memory: left as captured" in record.result.notes[0]
    assert not record.result.changed


def test_memory_is_that_of_the_values_alive_at_once() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x @ y  # 16 x 16 numbers of 4 bytes
        second = first.t() @ y
        return (second @ y).view(-1) + 1

    graph = traced(chain, torch.ones(16, 16), torch.ones(16, 16))
    one = 16 * 16 * 4
    assert peak_bytes(list(graph.nodes)) == 2 * one + 2 * one  # values, inputs


def test_off_is_off(tmp_path: Path) -> None:
    topology = slow_links(tmp_path / "slow.json")
    for options in (
        {"v_first": False},
        {"disable": ["schedule-v-first"]},
    ):
        torch._dynamo.reset()
        with fake_ranks(2):
            explanation = explain(
                Block().eval(), torch.ones(1, 8, WIDTH), options={"topology": topology, **options}
            )
        (graph,) = explanation.graphs
        names = [record.name for record in graph.report.passes]
        assert "schedule-v-first" not in names
        assert not any(record.result.changed for record in graph.report.passes), names


def test_a_setting_that_forbids_overlap_is_said_once_and_leaves_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = replace(CPU, blocking_variables=("CCL_OP_SYNC",))
    monkeypatch.setitem(DEVICE_KINDS, "cpu", blocked)
    monkeypatch.setenv("CCL_OP_SYNC", "1")
    topology = slow_links(tmp_path / "slow.json")
    with caplog.at_level(logging.WARNING, "cocodiff_compile"), fake_ranks(2):
        for _ in range(2):
            torch._dynamo.reset()
            explanation = explain(
                Block().eval(), torch.ones(1, 8, WIDTH), options={"topology": topology}
            )
    said = [message for message in caplog.messages if "CCL_OP_SYNC=1" in message]
    assert len(said) == 1
    (graph,) = explanation.graphs
    assert not any(record.result.changed for record in graph.report.passes)


def test_more_chunks_than_a_rank_has_heads_are_declined(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with fake_ranks(2):
        options = {"topology": slow_links(tmp_path / "slow.json"), "head_chunks": 5}
        explanation = explain(Block().eval(), torch.ones(1, 8, WIDTH), options=options)
    (declined,) = explanation.declined
    assert f"a rank has {HEADS // 2} heads of Q" in declined.reason


# Where torch cannot be told


def test_code_in_another_order_is_noticed() -> None:
    kinds = ["matmul", "all_to_all_single", "matmul", "wait"]
    call = "torch.ops._c10d_functional.{}.default(buf0)"
    lines = {
        "matmul": "extern_kernels.mm(a, b, out=buf1)",
        "all_to_all_single": call.format("all_to_all_single"),
        "wait": call.format("wait_tensor"),
    }

    def code(order: Sequence[str]) -> str:
        return "\n".join(["def call(args):", *(f"    {lines[kind]}" for kind in order)])

    assert keeps_order(code(kinds), kinds) is True
    assert keeps_order(code(["matmul", "all_to_all_single", "wait", "matmul"]), kinds) is False
    assert keeps_order(code(["matmul", "wait"]), kinds) is None
    assert keeps_order("", kinds) is None


def test_only_what_data_do_not_order_round_an_exchange_is_pinned() -> None:
    """Two matmuls hide an exchange, one of them reads the other; a third one comes before it."""
    c10d = torch.ops._c10d_functional

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x @ x
        started = c10d.all_to_all_single(x, [2, 2], [2, 2], "0")
        first = x @ x.t()
        second = first @ x
        return c10d.wait_tensor(started) @ second, before

    with fake_ranks(2):
        graph = traced(step, torch.ones(4, 4))
    before, start, first, second, wait, last = (node for node in graph.nodes if is_anchor(node))
    assert [str(node.target) for node in (start, wait)] == [
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.wait_tensor.default",
    ]
    pinned = {node: list(others) for node, others in pin_order.pins(graph)}
    assert pinned == {start: [before], first: [start], wait: [second]}
    assert last not in pinned


def test_a_torch_without_control_dependencies_is_said_once_and_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(pin_order, "order_nodes", lambda _graph, _before: False)
    new_key = str(uuid.uuid4())  # code from the cache would not show whether the pass ran
    monkeypatch.setattr(pin_order.PinOrder, "uuid", lambda _self: new_key)
    options = {"topology": slow_links(tmp_path / "slow.json")}
    torch._dynamo.reset()
    with fake_ranks(2), torch.no_grad(), caplog.at_level(logging.WARNING, "cocodiff_compile"):
        model = torch.compile(Block().eval(), backend="cocodiff", options=options)
        assert model(torch.ones(1, 64, WIDTH)).shape == (1, 64, WIDTH)
    assert any("cannot enforce an order" in message for message in caplog.messages)
