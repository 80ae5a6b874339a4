# SPDX-License-Identifier: Apache-2.0
"""diffusers' own Ulysses: its attentions are recognised, and option shard leaves them alone."""

from __future__ import annotations

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.lab.diffusers_ulysses import enable_ulysses
from cocodiff_compile.lab.small_models import SMALL_MODELS
from tests.support.captured import fake_ranks

AS_CAPTURED = {"tapa": "off", "v_first": False}


@pytest.mark.parametrize("name", ["flux", "qwen-image", "wan"])
def test_a_model_that_exchanges_tokens_itself_is_used_as_it_is(name: str) -> None:
    small = SMALL_MODELS[name]
    torch._dynamo.reset()
    with fake_ranks(4):
        model = small.build(num_layers=1)
        expected = small.num_ulysses_attentions(model)
        inputs = small.inputs(model)
        enable_ulysses(model)
        with torch.no_grad():
            model(**inputs)  # some of diffusers' hooks can be captured only after a first call
        options = {**AS_CAPTURED, "shard": {"min_gain": 0}}
        explanation = cocodiff_compile.explain(model, options=options, **inputs)
    assert len(explanation.sites) == expected
    assert not explanation.declined
    for site in explanation.sites:
        assert site.q.exchange.num_ranks == 4
        assert len(site.exchanges) == 4
    reports = [graph.report for graph in explanation.graphs]
    records = [report.passes[0] for report in reports if report.recognition.sites]
    assert {record.name for record in records} == {"shard-tokens"}
    for record in records:
        assert not record.result.changed
        assert record.result.notes == ("not shared out: the model exchanges tokens itself",)
