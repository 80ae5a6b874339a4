# SPDX-License-Identifier: Apache-2.0
"""explain and dumps of a plain model: what is shared out, where it is gathered, what is whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile import Explanation
from cocodiff_compile.decide.report_sharing import report_sharing
from cocodiff_compile.decide.shard_report import ModuleShare, ShardReport
from cocodiff_compile.decide.shared_nodes import choose_sharing
from cocodiff_compile.ir.aten import ALL_GATHER
from cocodiff_compile.lab.coverage.examine import COSTS, sharded_copy
from cocodiff_compile.report.describe_sharing import folded, format_sharing, percent
from cocodiff_compile.report.draw_sharing import draw_sharing
from tests.support.captured import capture_call, fake_ranks
from tests.support.plain_dits import PLAIN, WIDTH, Block


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def _explained(name: str, shard: dict[str, Any], **options: Any) -> Explanation:
    plain = PLAIN[name]
    given = {"shard": {"degree": 4, **shard}, "topology": "flat", "v_first": False, **options}
    return cocodiff_compile.explain(plain.build().eval(), *plain.inputs(), options=given)


def _rows(text: str, title: str) -> list[list[str]]:
    """Returns the cells of the table below a title."""
    lines = text.split(f"{title}:\n")[1].splitlines()
    rows = lines[2:]
    end = next((place for place, line in enumerate(rows) if "  " not in line), len(rows))
    return [re.split(r"\s{2,}", line) for line in rows[:end]]


@pytest.mark.parametrize("name", ["masked text, uneven", "two heads of keys", "space and time"])
def test_the_report_adds_up_to_what_the_cut_decided_and_the_pass_emits(name: str) -> None:
    plain = PLAIN[name]
    with fake_ranks(4):
        gm, _ = capture_call(plain.build().eval(), *plain.inputs())
        sharing = choose_sharing(gm.graph, "0", 4, COSTS)
        report = report_sharing(gm.graph, sharing, 4, COSTS)
        ours, _ = sharded_copy(gm, 4)
    assert report.step_s == pytest.approx(sharing.shared_s)
    assert report.one_rank_s == pytest.approx(sharing.whole_s)
    assert len(report.gathers) == sum(node.target is ALL_GATHER for node in ours.graph.nodes)
    rows = report.modules
    assert sum(row.num_shared for row in rows) == report.num_shared
    assert sum(row.num_whole for row in rows) == report.num_whole
    assert ShardReport.from_data(json.loads(json.dumps(report.to_data()))) == report


def test_attentions_gathers_and_slices_stand_in_the_table() -> None:
    explanation = _explained("masked text, uneven", {"min_gain": 0})
    assert not dist.is_initialized()
    text = str(explanation)
    assert "shared out, over 4 ranks: 59 of 67 ops" in text
    assert "whole on every rank: 8 ops" in text
    ((*attention, exchanges),) = _rows(text, "attentions")
    expected = ["blocks.0-1.attention", "2", "Ulysses", "8", "7+21 (padded to 8+24)", "28"]
    assert attention == expected
    assert exchanges.endswith(" us")
    (gather,) = _rows(text, "shares that are gathered")
    assert gather[1:4] == ["2 x 21 x 32", "1", "5.2 KiB"]
    assert gather[5:] == ["output", "the graph returns it"]
    slices = _rows(text, "wholes of which each rank takes its share")
    assert [row[1:4] for row in slices] == [
        ["2 x 21 x 32", "1", "1.3 KiB"],
        ["2 x 7 x 32", "1", "448 B"],
    ]
    assert "pass shard-tokens: shared out over 4 ranks; graph rewritten" in text


def test_keys_that_every_rank_needs_are_gathered() -> None:
    (report,) = _explained("two heads of keys", {"min_gain": 0}).sharing
    assert [item.mode for item in report.attentions] == ["cross", "cross"]
    keys = [item for item in report.gathers if item.reader != "output"]
    assert {item.why for item in keys} == {"every share of it reads all"}
    assert {item.reader_module for item in keys} == {"blocks.0.attention", "blocks.1.attention"}


def test_what_is_left_whole_says_why() -> None:
    (report,) = _explained("class-conditional", {"min_gain": 0}).sharing
    (row,) = report.left_whole
    assert (row.op, row.count, row.module) == ("aten.convolution.default", 1, "patches")
    assert row.why == "aten.convolution.default (convolution) has no rule"


def test_a_model_that_gains_too_little_is_reported_as_it_would_be() -> None:
    explanation = _explained("grouped heads", {"min_gain": 9})
    (report,) = explanation.sharing
    assert not report.is_applied
    assert "not shared out; it would be, over 4 ranks: " in str(explanation)
    assert "not shared out: estimated gain" in str(explanation)
    assert not explanation.sites


def test_an_attention_whose_exchanges_cost_too_much_says_so() -> None:
    """Exchanges of so few tokens take longer than all else."""
    text = str(_explained("grouped heads", {"min_gain": 0.5}))
    ((*attention, why),) = _rows(text, "attentions")
    assert attention[:5] == ["blocks.0-1.attention", "2", "whole", "8", "8+24"]
    assert re.fullmatch(
        r"cheaper whole: Ulysses saves \d+\.\d us, its exchanges take \d+\.\d+ us", why
    )


def test_a_dump_holds_the_tables_and_a_picture(tmp_path: Path) -> None:
    _explained("class-conditional", {"min_gain": 0}, debug_dir=tmp_path)
    (folder,) = (tmp_path / "rank_000").glob("graph_*")
    text = (folder / "sharing.txt").read_text()
    assert text.startswith("shared out, over 4 ranks: ")
    modules = text.split("\n\n")[1].splitlines()[2:]
    assert [line.split("  ")[0] for line in modules] == [
        "patches",
        "(the model itself)",
        "classes",
        "blocks.0-1",
        "head",
    ]
    picture = ElementTree.parse(folder / "sharing.svg").getroot()
    texts = [item.text for item in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "blocks.0-1 (2)" in texts
    assert "attentions: 1 Ulysses" in texts
    sharing = json.loads((folder / "explanation.json").read_text())["sharing"]
    assert draw_sharing(ShardReport.from_data(sharing)) == (folder / "sharing.svg").read_text()


class _BreaksInside(nn.Module):
    """Hands tokens from one graph to the next, inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_model_in_several_graphs_is_explained_one_by_one() -> None:
    model = nn.Sequential(_BreaksInside(), nn.Linear(WIDTH, WIDTH)).eval()
    options = {"shard": {"degree": 4, "min_gain": 0}, "v_first": False}
    explanation = cocodiff_compile.explain(model, torch.randn(1, 16, WIDTH), options=options)
    modes = [[item.mode for item in report.attentions] for report in explanation.sharing]
    assert [mode for mode in modes if mode] == [["Ulysses"], ["Ulysses"]]
    first, second = (report for report in explanation.sharing if report.attentions)
    assert (first.num_taken, first.num_kept, len(first.gathers)) == (0, 1, 0)
    assert (second.num_taken, second.num_kept, len(second.slices)) == (1, 1, 0)
    assert "handed from block to block as shares: 0 inputs, 1 output" in str(explanation)


def _module(number: int, **other: Any) -> ModuleShare:
    row = ModuleShare(f"blocks.{number}", 9, 1, 2.0, 1.0, ("Ulysses",), 0, 0)
    return replace(row, **other)


def test_alike_modules_share_a_row() -> None:
    rows = [_module(number) for number in range(57)]
    assert [row[1:] for row in folded(rows)] == [(57, "blocks.0-56")]
    rows[0] = _module(0, num_gathers=1)
    rows[9] = _module(9, num_gathers=2)
    assert [row[1:] for row in folded(rows)] == [
        (1, "blocks.0"),
        (55, "blocks.1..56"),
        (1, "blocks.9"),
    ]


def test_a_long_list_ends_in_a_count() -> None:
    (report,) = _explained("class-conditional", {"min_gain": 0}).sharing
    rows = tuple(replace(report.left_whole[0], op=f"aten.op{number}") for number in range(13))
    lines = format_sharing(replace(report, left_whole=rows)).splitlines()
    assert lines[-2].startswith("aten.op9 ")
    assert lines[-1] == "... and 3 more rows"


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0 %"), (1e-9, "0.1 %"), (0.8934, "89.3 %"), (1 - 1e-9, "99.9 %"), (1.0, "100 %")],
)
def test_only_nothing_is_none_and_only_all_is_all(part: float, text: str) -> None:
    assert percent(part) == text
