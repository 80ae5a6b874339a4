# SPDX-License-Identifier: Apache-2.0
"""Tests compiled models on real gloo ranks, with offloading or autocast, against Inductor alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cocodiff_compile
from cocodiff_compile.lab.bench.variants import ONLY_SHARED, SHARED
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from tests.ranks.test_compiled_ranks import INDUCTOR_ERROR
from tests.ranks.test_shard_changed_models import offload_by_group, offload_by_model

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(900)]

HEADS = 4


def _plain(_model: Any) -> None:
    """Leaves the model as it is."""


@dataclass(frozen=True)
class Case:
    """A change to the model, the type it computes in, and the number of chunks of its tokens."""

    change: Callable[[Any], None]
    dtype: torch.dtype = torch.float32
    token_chunks: int = 2
    sites: int = 2
    """The attentions of all graphs. Blocks that hooks keep apart hand each other shares from the
    second call on: the second block is compiled once more for that.
    """


CASES = {
    "model offload": Case(offload_by_model),
    "group offload": Case(offload_by_group, sites=3),
    "autocast": Case(_plain, torch.bfloat16, token_chunks=1),
    "autocast, tokens in chunks": Case(_plain, torch.bfloat16),
}
ROUNDED_DIFFERENTLY = "autocast, tokens in chunks"
"""Inductor rounds where fused kernels write to memory, and chunks are fused differently."""
ONE_ROUNDING = 2.0**-6


def _run(_rank: int, _num_ranks: int, name: str) -> dict[str, Any]:
    case = CASES[name]
    casts = case.dtype is not torch.float32
    small = SMALL_MODELS["flux"]
    model = small.build(num_layers=1, heads=HEADS)
    inputs = small.inputs(model, image_tokens=24 * HEADS, text_tokens=8 * HEADS)
    context = torch.autocast("cpu", case.dtype) if casts else contextlib.nullcontext()
    options: dict[str, Any] = {**SHARED, "tapa": "off"}
    options |= {"head_chunks": 2, "token_chunks": case.token_chunks}
    with torch.no_grad(), context, cocodiff_compile.collect_reports() as reports:
        expected = small.sample(model(**inputs))
        case.change(model)
        alone = torch.compile(model, backend="cocodiff", options=ONLY_SHARED)
        inductor = small.sample(alone(**inputs))
        reports.clear()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="cocodiff", options=options)
        found = [small.sample(compiled(**inputs)) for _ in range(2)]
    return {
        "off inductor by": max(float((item - inductor).abs().max()) for item in found),
        "off by": float((found[0].float() - expected.float()).abs().max()),
        "sites": sum(len(item.summary["sites"]) for item in reports),
    }


@pytest.mark.parametrize("name", CASES)
def test_compiled_ranks_compute_what_inductor_computes(name: str) -> None:
    for result in run_local_ranks(_run, 2, name, timeout_s=800):
        assert result["off inductor by"] <= (ONE_ROUNDING if name == ROUNDED_DIFFERENTLY else 0)
        assert result["off by"] <= (5e-2 if "autocast" in name else INDUCTOR_ERROR)
        assert result["sites"] == CASES[name].sites
