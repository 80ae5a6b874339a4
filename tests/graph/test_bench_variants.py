# SPDX-License-Identifier: Apache-2.0
"""Variants of `cocodiff bench` for models that diffusers has no Ulysses for."""

from __future__ import annotations

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.bench.cases import Workload
from cocodiff_compile.lab.bench.variants import ONLY_SHARED, VARIANTS, stock_ulysses, ulysses_of
from tests.support.captured import fake_ranks

SD3 = Workload("sd3", num_layers=1, heads=4, head_size=16, image_tokens=48, text_tokens=24)


def test_the_baseline_is_shared_out_and_otherwise_left_to_inductor() -> None:
    torch._dynamo.reset()
    with fake_ranks(2):
        model = stock_ulysses(SD3)
        explanation = cocodiff_compile.explain(model, options=ONLY_SHARED, **SD3.inputs(model))
    (graph,) = explanation.graphs
    (record,) = graph.report.passes
    assert (record.name, record.result.changed) == ("shard-tokens", True)
    assert not graph.report.is_ordered
    assert "shard-tokens" in ulysses_of(SD3)


def test_the_baseline_runs_under_the_settings_of_inductor_that_it_asks_for() -> None:
    found = []

    def note(*_args: object) -> None:
        found.append(torch._inductor.config.reorder_for_compute_comm_overlap)

    model = torch.nn.Identity()
    model.forward = torch.compiler.disable(note)  # type: ignore[assignment]
    with torch.no_grad(), fake_ranks(2):
        VARIANTS["overlap"]._compile_sharded(model, fullgraph=False)(torch.ones(2))
    assert found == [True]
    assert not torch._inductor.config.reorder_for_compute_comm_overlap


def test_nothing_runs_eagerly_where_diffusers_has_no_ulysses() -> None:
    with pytest.raises(UserError, match="diffusers has no Ulysses for SD3Transformer2DModel"):
        VARIANTS["eager"].compile(stock_ulysses(SD3), fullgraph=True)
