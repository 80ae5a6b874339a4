# SPDX-License-Identifier: Apache-2.0
"""The backend as users call it, and what it says when there is nothing for it to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

import cocodiff_compile
from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.pipeline.run_passes import PipelineReport
from cocodiff_compile.report.collect import GraphReport, collect_reports, publish
from cocodiff_compile.say_once import forget_what_was_said
from tests.support import hand_written
from tests.support.captured import fake_ranks
from tests.support.slow_links import slow_links
from tests.support.ulysses_block import WIDTH, Block


class Plain(nn.Module):
    """No parallelism at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    forget_what_was_said()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _x() -> torch.Tensor:
    return torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(0))


def test_the_entry_point_is_registered() -> None:
    assert "cocodiff" in torch._dynamo.list_backends()


def test_the_eager_entry_point_runs_what_the_passes_left(tmp_path: Path) -> None:
    options = {"topology": slow_links(tmp_path / "slow.json"), "head_chunks": 2}
    with fake_ranks(2), torch.no_grad(), collect_reports() as reports:
        model = hand_written.Block().eval()
        compiled = torch.compile(model, backend="cocodiff_eager", options=options)
        result, codes = run_and_get_code(compiled, torch.ones(1, 64, WIDTH))
    assert result.shape == (1, 64, WIDTH)
    assert codes == []
    (report,) = reports
    assert report.report.is_ordered
    assert report.summary["sites"][0]["num_exchanges"] == 8


def test_a_model_without_ulysses_compiles_as_inductor_would_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = [Plain().eval(), Plain().eval()]
    with fake_ranks(2), torch.no_grad(), caplog.at_level(logging.WARNING, "cocodiff_compile"):
        results = [torch.compile(model, backend="cocodiff")(_x()) for model in models]
    for model, result in zip(models, results, strict=True):
        torch._dynamo.reset()
        with torch.no_grad():
            assert torch.equal(result, torch.compile(model)(_x()))
    said = [record.getMessage() for record in caplog.records if "no Ulysses" in record.getMessage()]
    assert len(said) == 1
    assert "options={'shard': 'tokens'}" in said[0]


def test_without_a_process_group_it_says_what_to_call(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad(), caplog.at_level(logging.WARNING, "cocodiff_compile"):
        torch.compile(Plain().eval(), backend="cocodiff_eager")(_x())
    assert "init_process_group" in caplog.text


def test_gradients_are_left_to_inductor_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Plain()
    with caplog.at_level(logging.WARNING, "cocodiff_compile"):
        torch.compile(model, backend="cocodiff")(_x()).sum().backward()
        torch.compile(Plain(), backend="cocodiff_eager")(_x()).sum().backward()
    assert model.linear.weight.grad is not None
    assert caplog.text.count("gradients are on") == 1
    assert "torch.no_grad()" in caplog.text


def test_a_ulysses_model_with_gradients_on_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    with fake_ranks(2), caplog.at_level(logging.WARNING, "cocodiff_compile"):
        assert torch.compile(Block(), backend="cocodiff")(_x()).requires_grad
    assert "gradients are on" in caplog.text


def test_each_piece_around_a_graph_break_is_handled_on_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    with fake_ranks(2), torch.no_grad(), cocodiff_compile.collect_reports() as reports:
        torch.compile(Two().eval(), backend="cocodiff_eager")(_x())
    assert [len(report.summary["sites"]) for report in reports] == [1, 1]
    assert "declined" not in caplog.text


def test_a_graph_break_inside_an_attention_is_declined_in_both_pieces() -> None:
    with fake_ranks(2):
        explanation = cocodiff_compile.explain(Block(breaks=True).eval(), _x())
    assert len(explanation.graphs) == 2
    assert not explanation.sites
    reasons = " | ".join(item.reason for item in explanation.declined)
    assert "fullgraph=True" in reasons
    assert "comes from no all-to-all" in reasons


def test_what_was_declined_is_said_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with fake_ranks(2), torch.no_grad(), caplog.at_level(logging.WARNING, "cocodiff_compile"):
        torch.compile(Block(breaks=True).eval(), backend="cocodiff_eager")(_x())
    assert "declined" in caplog.text
    assert "leaves the graph" in caplog.text


def test_a_disabled_recognition_changes_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"disable": ["recognize-ulysses"]}
    with (
        fake_ranks(2),
        torch.no_grad(),
        caplog.at_level(logging.WARNING, "cocodiff_compile"),
        cocodiff_compile.collect_reports() as reports,
    ):
        torch.compile(Block().eval(), backend="cocodiff_eager", options=options)(_x())
    assert reports[0].summary["passes"] == []
    assert "recognize-ulysses is disabled" in caplog.text


def test_inductor_modes_are_taken_over() -> None:
    with fake_ranks(2), torch.no_grad():
        compiled = torch.compile(Block().eval(), backend="cocodiff", mode="reduce-overhead")
        assert compiled(_x()).shape == (1, 4, WIDTH)


def _backend(
    seen: Callable[[GraphModule], None], mode: str | None = None, **options: Any
) -> Callable[..., Any]:
    """The backend, but `seen` is called where code would be generated."""
    config = CompileConfig.from_options(options)

    def generate(gm: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        seen(gm)
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, example_inputs, config, generate, mode)

    return backend


@pytest.mark.parametrize(
    ("mode", "expected"), [(None, False), ("max-autotune-no-cudagraphs", True)]
)
def test_a_mode_reaches_inductors_settings(mode: str | None, expected: bool) -> None:
    seen: list[bool] = []
    backend = _backend(lambda _: seen.append(torch._inductor.config.max_autotune), mode)
    with torch.no_grad():
        torch.compile(Plain().eval(), backend=backend)(_x())
    assert seen == [expected]
    assert not torch._inductor.config.max_autotune


def test_an_unknown_mode_is_refused() -> None:
    compiled = torch.compile(Plain().eval(), backend="cocodiff", mode="bogus")
    with torch.no_grad(), pytest.raises(ValueError, match="mode='bogus'"):
        compiled(_x())


def test_a_graph_that_comes_in_broken_is_said_and_compiled_unchanged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cocodiff_compile.pipeline.run_passes.broken_rule", lambda _graph: "lint: as asked"
    )
    model, generated = Block().eval(), []
    with (
        fake_ranks(2),
        torch.no_grad(),
        caplog.at_level(logging.WARNING, "cocodiff_compile"),
        collect_reports() as reports,
    ):
        compiled = torch.compile(model, backend=_backend(lambda _: generated.append(True)))
        assert compiled(_x()).shape == (1, 4, WIDTH)
    assert generated == [True]
    assert "cannot be worked on: lint: as asked" in caplog.text
    assert "compiles it unchanged" in caplog.text
    assert "no Ulysses attention" not in caplog.text
    assert reports[0].report.refused


def _selective_outputs(gm_outputs: list[Any], **settings: Any) -> torch.Tensor:
    """Returns what a block with V-Major computes outside of `denoising`. Appends to `gm_outputs`
    the metadata of the output of every graph for which code would be generated.
    """
    backend = _backend(
        lambda gm: gm_outputs.append(gm.graph.output_node().meta),
        v_major={"policy": "fixed", "only_if_faster": False},
    )
    model = Block().eval()
    with fake_ranks(2), torch.no_grad(), torch._inductor.config.patch(**settings):
        compiled = torch.compile(model, backend=backend)
        with cocodiff_compile.denoising(num_steps=2) as run:
            compiled(_x())
            run.step()
            compiled(_x())
        found: torch.Tensor = compiled(_x())
        return found


def test_inductor_is_told_which_outputs_of_a_kind_of_step_callers_see() -> None:
    """Inductor keeps the strides of such outputs on devices where it pads other tensors."""
    metas: list[Any] = []
    _selective_outputs(metas)
    assert len(metas) == 3
    assert [list(meta["user_visible_output_idxs"]) for meta in metas] == [[0]] * 3


def test_with_frozen_weights_v_major_is_declined_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metas: list[Any] = []
    with caplog.at_level(logging.WARNING, "cocodiff_compile"):
        assert _selective_outputs(metas, freezing=True).shape == (1, 4, WIDTH)
    assert len(metas) == 1
    assert "freezing makes constants of weights" in caplog.text


def test_every_graph_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with fake_ranks(2):
        cocodiff_compile.explain(
            Block(breaks=True).eval(), _x(), options={"debug_dir": str(tmp_path)}
        )
    folders = sorted((tmp_path / "rank_000").glob("graph_*"))
    assert len(folders) == 2
    codes = [(folder / "00_captured.py").read_text() for folder in folders]
    assert "scaled_dot_product" not in codes[0]
    assert "scaled_dot_product" in codes[1]


def _report(number: int) -> GraphReport:
    return GraphReport(number, 0, CompileConfig(), PipelineReport(), {}, 0)


def test_reports_reach_every_open_block_and_no_closed_one() -> None:
    first, second, third = map(_report, range(3))
    with collect_reports() as outer:
        with collect_reports():
            pass  # closed while both are empty, and therefore equal
        publish(first)
        with collect_reports() as inner:
            publish(second)
        publish(third)
    publish(_report(3))
    assert outer == [first, second, third]
    assert inner == [second]


CACHED = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import cocodiff_compile
from tests.compile.test_backend import _x
from tests.support.ulysses_block import Block
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
torch.manual_seed(0)
with torch.no_grad(), cocodiff_compile.collect_reports() as reports:
    torch.compile(Block().eval(), backend="{backend}")(_x())
print("sites", [len(report.summary["sites"]) for report in reports])
"""


def test_passes_run_although_inductor_has_the_graph_in_its_cache(tmp_path: Path) -> None:
    """A hit in AOTAutograd's cache would skip every pass, also one left by plain Inductor."""

    def run(backend: str) -> str:
        code = textwrap.dedent(CACHED.format(backend=backend))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert "sites []" in run("inductor")
    assert "sites [1]" in run("cocodiff")
    assert "sites [1]" in run("cocodiff")
