# SPDX-License-Identifier: Apache-2.0
"""independent work: of the site's own stretch of graph, and neither before nor behind its data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cocodiff_compile.passes.recognize_ulysses import recognize
from tests.support.captured import capture, fake_ranks, is_weight_of
from tests.support.hand_written import WIDTH
from tests.support.hand_written_more import Dual, WithSides

CASES: list[tuple[Callable[[], nn.Module], tuple[tuple[str, ...], ...]]] = [
    (WithSides, (("before", "between"), ("between", "behind"))),
    (
        Dual,
        (
            tuple(f"second_modules_{name}" for name in ("to_q", "to_k", "to_v")),
            ("first_modules_to_out",),
        ),
    ),
]


@pytest.mark.parametrize(("build", "independent"), CASES, ids=["sides", "dual"])
def test_independent_work_is_of_the_stretch_of_its_site(
    build: Callable[[], nn.Module], independent: tuple[tuple[str, ...], ...]
) -> None:
    with fake_ranks(4):
        (gm,) = capture(build(), torch.ones(2, 5, WIDTH))
        sites = recognize(gm.graph).sites
    assert len(sites) == len(independent)
    for site, modules in zip(sites, independent, strict=True):
        assert len(site.independent) == len(modules)
        for node, module in zip(site.independent, modules, strict=True):
            assert is_weight_of(gm, node, module)
