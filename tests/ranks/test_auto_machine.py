# SPDX-License-Identifier: Apache-2.0
"""`topology="auto"` on real ranks: measured once, the same plan on every rank, and kept."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from cocodiff_compile.compiler import find_machines
from cocodiff_compile.compiler.explain import explain
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.ranks import groups
from cocodiff_compile.report.collect import collect_reports
from tests.support import hand_written
from tests.support.hand_written import WIDTH, Block

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def _phases(model: Any, x: torch.Tensor, **options: str) -> list[list[list[str]]]:
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        torch.compile(model, backend="cocodiff", options=options, fullgraph=True)(x)
    return [leg["phases"] for site in reports[0].summary["sites"] for leg in site["legs"]]


def _half(rank: int, num_ranks: int, cache: str) -> dict[str, Any]:
    """Ulysses over each half of the world, data parallel beside it; two models, one machine. Each
    half keeps what it measures to itself, so that both do measure.
    """
    os.environ["XDG_CACHE_HOME"] = f"{cache}/{rank // (num_ranks // 2)}"
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("data", "ulysses"))
    half = mesh.get_group("ulysses")
    hand_written.group = lambda: half
    model, x = Block().eval(), torch.ones(1, 2, WIDTH)
    found: dict[str, Any] = {"before": str(explain(model, x))}
    found["auto"] = _phases(model, x)
    made = dict(groups._made.get())
    found["on"] = _phases(Block().eval(), x, tapa="on")
    found["same groups"] = made == groups._made.get()
    found["members"] = sorted(made)
    (found["topology"],) = find_machines._found.get().values()
    found["after"] = str(explain(model, x, options={"tapa": "on"}))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return run_local_ranks(_half, 8, cache, timeout_s=400, ranks_per_node=2)


def test_every_rank_of_a_group_has_the_same_measured_machine(ranks: list[dict[str, Any]]) -> None:
    for half in (ranks[:4], ranks[4:]):
        (topology,) = {found["topology"] for found in half}
        assert [(axis.name, axis.size) for axis in topology.axes] == [("local", 2), ("node", 2)]
        assert topology.measured
        assert len({str(found["auto"]) for found in half}) == 1


def test_on_takes_phases_and_a_second_model_the_same_groups(ranks: list[dict[str, Any]]) -> None:
    way_in = [["local"], ["node"]]
    for rank, found in enumerate(ranks):
        assert sorted(found["on"][0]) == way_in
        assert found["same groups"]
        first = rank // 4 * 4
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        across = tuple(sorted((rank, first + (rank - first + 2) % 4)))
        whole = tuple(range(first, first + 4))  # made by the probe
        assert found["members"] == sorted([pair, across, whole])


def test_one_rank_may_look_without_the_others(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "1 Ulysses attention" in found["before"]
        assert "exchanges: local | node" in found["after"] or "node | local" in found["after"]
