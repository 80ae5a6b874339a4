# SPDX-License-Identifier: Apache-2.0
"""Every attention op of a library through every pass: found, rewritten, the same on every rank."""

from __future__ import annotations

import pytest
import torch

from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import WIDTH, FusedProjection, Layout, WithMlp, diffusers_in, each
from tests.support.hand_written_more_declined import round_robin_tokens_out
from tests.support.random_trials import RUNS, try_passes
from tests.support.stand_in_attentions import STAND_INS

NUM_RANKS = 4
HEADS = 16


class Model(FusedProjection, WithMlp):
    """One GEMM for query, key and value, and an MLP that can run while they are exchanged."""

    def build(self) -> None:
        WithMlp.build(self)
        FusedProjection.build(self)


@pytest.mark.parametrize("name", ["flash_attn::_flash_attn_varlen_forward"])
def test_tokens_dealt_round_robin_are_declined_also_with_lengths(name: str) -> None:
    """They lie outside of what is scattered, as samples do, but are none."""
    layout = Layout(each(diffusers_in), round_robin_tokens_out)
    model = Model(layout, STAND_INS[name].attend, heads=HEADS)
    with fake_ranks(NUM_RANKS):
        (gm,) = capture(model, torch.randn(2, 8, WIDTH))
        recognition = recognize(gm.graph)
    assert not recognition.sites
    assert "dealt round-robin" in recognition.declined[0].reason


@pytest.mark.parametrize("name", STAND_INS)
def test_passes_work_on_every_op_that_ships(name: str) -> None:
    op = STAND_INS[name]
    model = Model(attend=op.attend, heads=HEADS)
    x = torch.randn(2, 8, WIDTH)
    sites, outcomes = try_passes(model, [x], NUM_RANKS)
    left = {"chunk-heads": op.is_cut_by_heads, "chunk-tokens": op.is_cut_by_tokens}
    assert sites == 1
    assert outcomes == {run: "rewritten" if left.get(run, True) else "declined" for run in RUNS}
