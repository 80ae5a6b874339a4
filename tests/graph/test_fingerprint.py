# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of graphs: the same on every rank, another for another graph."""

from __future__ import annotations

import torch
from torch import Tensor

import cocodiff_compile
from cocodiff_compile.ir.fingerprint import fingerprint
from cocodiff_compile.lab.small_models import SMALL_MODELS
from tests.support.captured import fake_ranks
from tests.support.traced import traced


def test_every_rank_has_the_same_fingerprint() -> None:
    """A rank's number is an input of its graph."""
    found = set()
    for rank in (0, 3):
        torch._dynamo.reset()
        with fake_ranks(4, rank=rank):
            small = SMALL_MODELS["flux"]
            model = small.build(num_layers=1, heads=4, head_size=16)
            inputs = small.inputs(model, image_tokens=32, text_tokens=8)
            options = {"shard": {"min_gain": 0}}
            (graph,) = cocodiff_compile.explain(model, options=options, **inputs).graphs
        assert graph.report.fingerprint
        found.add(graph.report.fingerprint)
    assert len(found) == 1


def test_another_graph_has_another_fingerprint() -> None:
    x = torch.ones(4, 6)

    def base(x: Tensor) -> Tensor:
        return torch.relu(x @ x.t())

    others = (
        lambda x: torch.abs(x @ x.t()),
        lambda x: torch.relu(x.t() @ x),
        lambda x: (torch.relu(x @ x.t()), x @ x.t()),
    )
    found = [fingerprint(traced(call, x)) for call in (base, *others)]
    found.append(fingerprint(traced(base, torch.ones(6, 4).t())))
    found.append(fingerprint(traced(base, torch.ones(8, 6))))
    assert len(set(found)) == len(found)
    assert fingerprint(traced(base, x)) == found[0]
