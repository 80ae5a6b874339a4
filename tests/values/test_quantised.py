# SPDX-License-Identifier: Apache-2.0
"""Linears that torchao quantised, through every pass: found, rewritten, the same on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cocodiff_compile.ir.aten import aten
from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import WIDTH, Block, WithMlp
from tests.support.random_trials import try_passes

NUM_RANKS = 4
HEADS = 8
CONFIGS = {
    "int8 weights": ("Int8WeightOnlyConfig", torch.float32),
    "int8": ("Int8DynamicActivationInt8WeightConfig", torch.float32),
    "fp8 weights": ("Float8WeightOnlyConfig", torch.bfloat16),
}

pytestmark = pytest.mark.slow


def _quantised(model: nn.Module, name: str) -> tuple[nn.Module, torch.dtype]:
    from torchao import quantization  # noqa: PLC0415  (slow, and not needed by `make test`)

    config, dtype = CONFIGS[name]
    model = model.eval().to(dtype)
    quantization.quantize_(model, getattr(quantization, config)())
    return model, dtype


@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_linears_are_projections(name: str) -> None:
    model, dtype = _quantised(Block(heads=HEADS), name)
    with fake_ranks(NUM_RANKS):
        (gm,) = capture(model, torch.randn(2, 8, WIDTH, dtype=dtype))
        (site,) = recognize(gm.graph).sites
    targets = {item.node.target for leg in site.legs for item in leg.projections}
    assert [len(leg.projections) for leg in site.legs] == [1, 1, 1, 1]
    assert targets <= ({aten._int_mm.default} if name == "int8" else {aten.mm.default})


@pytest.mark.parametrize("name", CONFIGS)
def test_every_pass_keeps_every_bit(name: str) -> None:
    model, dtype = _quantised(nn.Sequential(WithMlp(heads=HEADS), WithMlp(heads=HEADS)), name)
    x = torch.randn(2, 8, WIDTH, dtype=dtype)
    sites, outcomes = try_passes(model, [x], NUM_RANKS)
    assert sites == 2
    assert outcomes.pop("split-projections") == "left"
    assert set(outcomes.values()) == {"rewritten"}
