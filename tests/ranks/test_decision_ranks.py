# SPDX-License-Identifier: Apache-2.0
"""A decision of live ranks, saved by one of them and given back to all, over real messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn

import cocodiff_compile
from cocodiff_compile.compiler import compile_graph, stages
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.report.collect import GraphReport
from tests.support.hand_written import WIDTH, Block

NUM_RANKS = 2
SEARCHES = [
    (compile_graph, "find_device"),
    (stages, "choose_unfused"),
    (stages, "choose_phases"),
    (stages, "choose_token_chunks"),
    (stages, "choose_order"),
]


def _run(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, GraphReport]:
    torch._dynamo.reset()
    options = {"topology": "auto", "head_chunks": 2, **options}
    with torch.no_grad(), cocodiff_compile.collect_reports() as reports:
        result = torch.compile(model, backend="cocodiff_eager", options=options)(x)
    (report,) = reports
    return result, report


def _rank(rank: int, _num_ranks: int, file: str) -> dict[str, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    torch.manual_seed(rank)
    x = torch.randn(1, 256, WIDTH)
    first, decided = _run(model, x)
    if rank == 0:
        cocodiff_compile.save_decisions([decided], file)
    dist.barrier()
    failing = mock.Mock(side_effect=AssertionError("something was searched for, or measured"))
    for module, name in SEARCHES:
        setattr(module, name, failing)
    second, given = _run(model, x, decision=file)
    return {
        "equal": torch.equal(first, second),
        "same decision": given.report.decision == decided.report.decision,
        "chunked": decided.report.decision.head_chunks == (2, 2),
    }


@pytest.mark.gloo
def test_ranks_do_as_one_of_them_saved(tmp_path: Path) -> None:
    file = str(tmp_path / "decisions.json")
    for result in run_local_ranks(_rank, NUM_RANKS, file, timeout_s=300):
        assert result == {"equal": True, "same decision": True, "chunked": True}
