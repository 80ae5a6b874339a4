# SPDX-License-Identifier: Apache-2.0
"""explain: a table for people, records for code, and nothing computed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import cocodiff_compile
from cocodiff_compile.say_once import forget_what_was_said
from tests.support.captured import fake_ranks
from tests.support.ulysses_block import HEAD_SIZE, HEADS, WIDTH, Block


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks(2):
        yield


def _x(tokens: int = 4) -> torch.Tensor:
    return torch.randn(1, tokens, WIDTH)


def test_the_table_names_site_module_shapes_bytes_and_passes() -> None:
    text = str(cocodiff_compile.explain(nn.Sequential(Block(), Block()).eval(), _x()))
    assert "1 graph, 2 Ulysses attentions" in text
    assert f"8 x {HEADS} x {HEAD_SIZE}" in text, "tokens of all ranks x heads x head size"
    assert text.count("512 B") == 8, "four exchanges per site, 4 tokens x 4 heads x 8 x 4 bytes"
    assert "pass recognize-ulysses: 2 recognised, 0 declined; graph unchanged" in text


def test_json_holds_what_the_records_hold() -> None:
    explanation = cocodiff_compile.explain(Block().eval(), _x())
    (site,) = explanation.sites
    (graph,) = json.loads(explanation.to_json())["graphs"]
    (described,) = graph["sites"]
    assert described["num_exchanges"] == 4
    assert [leg["role"] for leg in described["legs"]] == ["q", "k", "v", "o"]
    for leg, record in zip(described["legs"], site.legs, strict=True):
        assert leg["exchange"] == record.exchange.start.name
        assert leg["bytes"] == record.exchange.size_bytes == 512
        assert leg["wire_bytes"] == 256, "half of it stays with this rank of two"
        assert leg["ranks"] == [0, 1]
    assert described["legs"][0]["scatters"] == "heads"
    assert described["legs"][3]["scatters"] == "tokens"


def test_a_declined_attention_is_in_the_table_with_its_reason() -> None:
    explanation = cocodiff_compile.explain(Block(breaks=True).eval(), _x())
    assert not explanation.sites
    assert explanation.declined
    for item in explanation.declined:
        assert item.reason in str(explanation)


def test_symbolic_sizes_are_shown_as_formulas() -> None:
    x = _x()
    torch._dynamo.mark_dynamic(x, 1)
    explanation = cocodiff_compile.explain(Block().eval(), x)
    (site,) = explanation.sites
    assert isinstance(site.q.tokens_per_rank, torch.SymInt)
    symbol = str(site.q.tokens_per_rank)
    assert f"2*{symbol} x {HEADS}" in str(explanation)
    assert json.loads(explanation.to_json())["graphs"][0]["sites"][0]["bytes"] == 4 * 512


def test_nothing_is_computed_and_no_code_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("explain must not generate code")

    monkeypatch.setattr("torch._inductor.compile_fx._compile_fx_inner", forbidden)
    assert len(cocodiff_compile.explain(Block().eval(), _x()).sites) == 1


def test_a_model_without_ulysses_is_explained_too() -> None:
    text = str(cocodiff_compile.explain(nn.Linear(4, 4), torch.ones(4)))
    assert "no Ulysses attention" in text


def test_bad_options_are_refused_before_anything_is_captured() -> None:
    with pytest.raises(ValueError, match="did you mean 'tapa'"):
        cocodiff_compile.explain(Block(), _x(), options={"tapaa": "on"})


def test_a_function_and_keyword_arguments() -> None:
    block = Block().eval()
    explanation = cocodiff_compile.explain(lambda *, x: block(x) * 2, x=_x())
    assert len(explanation.sites) == 1


def test_explaining_again_and_again_leaves_the_model_to_torch_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    block = Block().eval()
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            explanation = cocodiff_compile.explain(block, _x())
            assert (len(explanation.graphs), len(explanation.sites)) == (1, 1)
    assert caplog.messages == []
    with torch.no_grad(), cocodiff_compile.collect_reports() as reports:
        torch.compile(block, backend="cocodiff")(_x())
    assert [len(report.summary["sites"]) for report in reports] == [1]


@pytest.mark.parametrize("breaks", [False, True])
def test_explain_logs_nothing(caplog: pytest.LogCaptureFixture, breaks: bool) -> None:
    forget_what_was_said()
    with caplog.at_level(logging.WARNING):
        cocodiff_compile.explain(Block(breaks=breaks).eval(), _x())
        cocodiff_compile.explain(nn.Linear(4, 4), torch.ones(4))
    assert caplog.messages == []


def test_what_most_steps_carry_and_remember_is_told() -> None:
    options = {"v_major": {"policy": "fixed", "bits": 2, "only_if_faster": False}}
    model = nn.Sequential(Block(), Block()).eval()
    explanation = cocodiff_compile.explain(model, _x(), options=options)
    assert "8 exchanges (2 bits) cache 0.01 MiB per guidance pass" in str(explanation)
    # Of 4 tokens x 4 heads: 2 bytes of numbers and 12 bits of scale each. Towards 2 ranks: 8 bytes
    # for spreads.
    sizes = {leg.exchange.size_bytes for site in explanation.sites for leg in site.legs}
    assert sizes == {16 * 2 + 16 * 12 // 8 + 2 * 8}


def test_exchanges_too_small_to_be_worth_coding_are_told() -> None:
    options = {"v_major": {"policy": "fixed", "bits": 2}}
    explanation = cocodiff_compile.explain(Block().eval(), _x(), options=options)
    assert "coding would take" in str(explanation)
    assert {leg.exchange.size_bytes for site in explanation.sites for leg in site.legs} == {512}
