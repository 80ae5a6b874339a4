# SPDX-License-Identifier: Apache-2.0
"""A model with planted problems, for pages: one attention that is declined, and exchanges that
nothing can hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cocodiff_compile
from cocodiff_compile.compiler.explain import Explanation
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from tests.support import hand_written as hw
from tests.support.hand_written_declined import opaque_attention

ODD_NAME = '<img src=x onerror=alert(1)>&"quoted"'
"""The name of the module whose attention is declined."""
SLOW = """
name: slow-pair
copy_bytes_per_s: 1.0e+10
links: {wire: {bytes_per_s: 1.0e+6, latency_s: 1.0e-3}}
axes: [{name: rank, size: 4, link: wire}]
"""


class Planted(nn.Module):
    """Two attentions one behind the other: one that is understood, one with an op that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = hw.Block()
        self.add_module(ODD_NAME, hw.Block(attend=opaque_attention))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(ODD_NAME)(self.first(x))


def explain_planted(folder: Path, options: Mapping[str, Any] | None = None) -> Explanation:
    """Explains it over four ranks on a slow wire."""
    torch._dynamo.reset()
    file = folder / "slow.yaml"
    file.write_text(SLOW)
    with fake_ranks(4):
        given = {"topology": str(file), **(options or {})}
        return cocodiff_compile.explain(Planted().eval(), torch.ones(2, 5, hw.WIDTH), options=given)
