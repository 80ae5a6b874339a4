# SPDX-License-Identifier: Apache-2.0
"""The page of a compile: written to debug_dir and by an explanation, from data that are plain."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cocodiff_compile
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.generated_order import graph_kinds
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.choose import device_kind
from cocodiff_compile.errors import UserError
from cocodiff_compile.report.compile_page import graph_sections
from cocodiff_compile.report.rank_page import RankPage
from cocodiff_compile.report.v_major_sections import v_major_section
from tests.support.captured import fake_ranks
from tests.support.planted import ODD_NAME, explain_planted
from tests.support.ulysses_block import WIDTH, Block


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A debug_dir with the page of the planted model, and beside it what the explanation writes."""
    folder = tmp_path_factory.mktemp("planted")
    explanation = explain_planted(folder, {"debug_dir": str(folder / "dumps")})
    explanation.write_page(folder / "explained.html")
    explanation.write_page(folder / "explained.json")
    return folder


def blobs_of(text: str) -> list[Any]:
    """Returns the data of a page, in their order."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', text)
    assert len({name for name, _ in found}) == len(found), "each has a name of its own"
    return [json.loads(zlib.decompress(base64.b64decode(item))) for _, item in found]


def test_debug_dir_and_the_explanation_write_the_same_page(planted: Path) -> None:
    text = (planted / "explained.html").read_text()
    assert (planted / "dumps" / "rank_000" / "index.html").read_text() == text
    assert text.count('<details class="section"') == 7, "no sharing, no V-Major"


def test_a_module_with_markup_in_its_name_is_text(planted: Path) -> None:
    text = (planted / "explained.html").read_text()
    assert escape(ODD_NAME) in text
    assert "<img" not in text


def test_the_timeline_holds_both_orders_and_what_each_exchange_is_exposed_for(
    planted: Path,
) -> None:
    timeline, _ = blobs_of((planted / "explained.html").read_text())
    (graph,) = json.loads((planted / "explained.json").read_text())["graphs"]
    captured, final = timeline["charts"]
    assert (captured["title"], final["step_ns"]) == ("as captured", graph["final"]["step_ns"])
    for chart in (captured, final):
        spans, tasks = chart["spans"], chart["tasks"]
        assert len({len(column) for column in spans.values()}) == 1
        assert len({len(column) for column in tasks.values()}) == 1
        waits = [n for n, kind in enumerate(spans["kind"]) if kind == "wait"]
        exposed = sum(item["exposed_ns"] for item in chart["exchanges"])
        assert exposed == pytest.approx(sum(spans["for"][n] for n in waits), rel=1e-6)
        assert exposed == pytest.approx(chart["exposed_ns"], rel=1e-6)
    roles = [role for role in final["tasks"]["role"] if role]
    assert sorted(set(roles)) == ["K", "O", "Q", "V"]


def test_waits_carry_what_they_wait_for(planted: Path) -> None:
    timeline, _ = blobs_of((planted / "explained.html").read_text())
    tasks = timeline["charts"][1]["tasks"]
    waits = [n for n, started in enumerate(tasks["of"]) if started >= 0]
    assert waits
    assert all(tasks["role"][n] == tasks["role"][tasks["of"][n]] for n in waits)


def test_the_data_are_plain_and_hold_the_graph_before_and_after(planted: Path) -> None:
    (graph,) = json.loads((planted / "explained.json").read_text())["graphs"]
    assert graph["summary"]["declined"]
    assert graph["stages"]["stages"][0]["name"] == "captured"
    assert any("all_to_all_single" in line for line in graph["stages"]["text"])
    assert graph["options"]["topology"] == {"value": "slow-pair (4 ranks)", "is_default": False}


class TwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)


@pytest.fixture
def ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks(2, rank=1):
        yield


@pytest.mark.usefixtures("ranks")
def test_all_graphs_of_a_rank_are_on_its_page(tmp_path: Path) -> None:
    options = {"debug_dir": str(tmp_path)}
    cocodiff_compile.explain(TwoGraphs().eval(), torch.ones(1, 4, WIDTH), options=options)
    text = (tmp_path / "rank_001" / "index.html").read_text()
    assert "cocodiff: rank 1" in text
    names = re.findall(
        r'<option value="(\d)"[^>]*>(\d): [^<]*, attentions: (\d), problems: \d', text
    )
    assert names == [("0", "0", "1"), ("1", "1", "1")]
    assert len(blobs_of(text)) == 4, "a timeline and a diff for each graph"


@pytest.mark.usefixtures("ranks")
def test_a_page_that_cannot_be_written_is_said_and_nothing_stops(tmp_path: Path, said: Any) -> None:
    (tmp_path / "rank_001" / "index.html").mkdir(parents=True)
    options = {"debug_dir": str(tmp_path)}
    explanation = cocodiff_compile.explain(Block().eval(), torch.ones(1, 4, WIDTH), options=options)
    assert len(explanation.sites) == 1
    assert said("was not written") == 1
    with pytest.raises(UserError, match="cannot write"):
        explanation.write_page(tmp_path)


@pytest.mark.usefixtures("ranks")
def test_what_becomes_known_later_is_added(tmp_path: Path) -> None:
    explanation = cocodiff_compile.explain(Block().eval(), torch.ones(1, 4, WIDTH))
    (graph,) = explanation.graphs
    assert graph.page is not None
    page = RankPage(tmp_path / "index.html")
    page.add(graph.page)
    assert "order not kept" not in page.file.read_text()
    page.update(graph.number, graph.page["kind"], lost_order=True)
    assert "order not kept" in page.file.read_text()
    page.update(graph.number + 1, "another", lost_order=True)  # of no graph on this page


_CALLS = {
    "wait": "torch.ops._c10d_functional.wait_tensor.default(",
    "all_to_all_single": "torch.ops._c10d_functional.all_to_all_single.default(",
    "matmul": "extern_kernels.mm(",
    "attention": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(",
}


class _Backwards:
    """Stands in for generated code that runs all calls of a graph, the last one first."""

    _boxed_call = True

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        calls = [f"    {_CALLS[kind]})" for kind in reversed(graph_kinds(gm.graph))]
        self.source_code = "\n".join(["def call(args):", *calls])
        self.gm = gm

    def __call__(self, args: list[Any]) -> Any:
        return self.gm(*args)


@pytest.mark.usefixtures("ranks", "without_gradients")
def test_an_order_that_generated_code_does_not_keep_is_a_problem(tmp_path: Path) -> None:
    config = CompileConfig.from_options({"debug_dir": str(tmp_path)})
    device = device_kind("cpu").guess

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def generate(made: torch.fx.GraphModule, *_: Any, **_options: Any) -> Any:
            return _Backwards(made)

        return compile_graph(gm, inputs, config, generate, device=device)

    torch.compile(Block().eval(), backend=backend)(torch.ones(1, 64, WIDTH))
    page = (tmp_path / "rank_001" / "index.html").read_text()
    assert "Inductor did not keep the new order" in page


@pytest.mark.usefixtures("ranks")
def test_v_major_waits_for_steps_and_then_shows_each_layer(tmp_path: Path) -> None:
    explanation = cocodiff_compile.explain(
        Block().eval(), torch.ones(1, 4, WIDTH), options={"v_major": {"only_if_faster": False}}
    )
    (graph,) = explanation.graphs
    assert graph.page is not None
    page = RankPage(tmp_path / "index.html")
    page.add(graph.page)
    assert "No denoising step was recorded yet" in page.file.read_text()
    step = {"full_bytes": 100, "cache_bytes": 7, "losses": []}
    steps = [
        {**step, "step": 0, "kinds": {"exact": 1}, "sent_bytes": 100},
        {**step, "step": 1, "kinds": {"2 bits": 1}, "sent_bytes": 25, "losses": [0.125]},
    ]
    page.show_run(
        graph.number,
        {
            "steps": steps,
            "layers": ["a<b"],
            "full_by_layer": [80],
            "sent_by_layer": {"2 bits": [20]},
        },
    )
    text = page.file.read_text()
    *_, sent, lost = blobs_of(text)
    assert (sent["rows"], sent["columns"], sent["values"]) == (["a<b"], ["0", "1"], [[1.0, 0.25]])
    assert (lost["word"], lost["values"]) == ("lost", [[None, 0.125]])
    assert "62.5 %" in text, "of all bytes"


@pytest.mark.usefixtures("ranks", "without_gradients")
def test_a_denoising_run_writes_its_steps_to_the_page(tmp_path: Path) -> None:
    options = {
        "v_major": {"policy": "adaptive", "only_if_faster": False},
        "debug_dir": str(tmp_path),
    }
    model = torch.compile(Block().eval(), backend="cocodiff_eager", dynamic=False, options=options)
    with cocodiff_compile.denoising(num_steps=4) as run:
        for _ in range(4):
            model(torch.randn(1, 4, WIDTH))
            run.step()
    blobs = blobs_of((tmp_path / "rank_001" / "index.html").read_text())
    sent, lost, *_ = [blob for blob in blobs if "word" in blob]
    assert sent["columns"] == ["0", "1", "2", "3"]
    total = sum(item.sent_bytes for item in run.history) / run.history[0].full_bytes
    assert sum(sent["values"][0]) == pytest.approx(total), "one layer sends all"
    assert lost["values"][0][:3] == [item.losses[0] for item in run.history[:3]]
    assert lost["values"][0][3] is None, "the caches of a picture are freed behind its last step"


@pytest.mark.usefixtures("ranks", "without_gradients")
def test_losses_are_those_of_their_attention(tmp_path: Path) -> None:
    """The second block sends what coding hardly loses anything of: heads that are all alike."""
    options = {
        "v_major": {"policy": "adaptive", "only_if_faster": False},
        "debug_dir": str(tmp_path),
    }
    blocks = nn.Sequential(Block(), Block()).eval()
    for part in blocks[1].to_qkv:
        nn.init.zeros_(part.weight)
    model = torch.compile(blocks, backend="cocodiff_eager", dynamic=False, options=options)
    with cocodiff_compile.denoising(num_steps=4) as run:
        for _ in range(4):
            model(torch.randn(1, 4, WIDTH))
            run.step()
    first, second = run.history[1].losses
    assert second < first / 3


def test_v_major_without_a_loss_says_which_policy_measures_it() -> None:
    step = {"step": 0, "kinds": {"exact": 1}, "sent_bytes": 1, "full_bytes": 1, "cache_bytes": 0,
            "losses": []}  # fmt: skip
    recorded = {"steps": [step], "layers": [], "full_by_layer": [], "sent_by_layer": {}}
    texts = [part for part in v_major_section(recorded).parts if hasattr(part, "text")]
    assert any("adaptive" in part.text for part in texts)


def test_a_graph_that_was_refused_has_a_page_too(planted: Path) -> None:
    (graph,) = json.loads((planted / "explained.json").read_text())["graphs"]
    summary = {**graph["summary"], "refused": "broken", "sites": [], "declined": [], "passes": []}
    bare = {**graph, "summary": summary, "final": None, "captured": None, "machines": []}
    names = [section.name for section in graph_sections(bare)]
    assert names == ["Summary", "Problems", "Graph", "Settings"]


def test_a_page_opens_with_what_matters_most(planted: Path) -> None:
    (graph,) = json.loads((planted / "explained.json").read_text())["graphs"]
    lead = graph_sections(graph)[0].lead
    assert lead.startswith("An attention was declined. Links are busy for ")
    assert "no order can hide that" in lead


def test_tables_show_the_order_that_was_kept(planted: Path) -> None:
    (graph,) = json.loads((planted / "explained.json").read_text())["graphs"]
    schedule = graph["summary"]["schedule"]
    assert not schedule["is_ordered"]
    assert schedule["after"] == schedule["before"]
    assert "left as captured" in graph["text"]
