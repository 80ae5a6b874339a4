# SPDX-License-Identifier: Apache-2.0
"""Tests of what has to hold on real devices of every kind: run `pytest -m xpu` where one is.

Here the CPU shows that the tests themselves run; XPU and CUDA are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from cocodiff_compile.compat import compile_fx_inner
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.generated_order import graph_kinds, keeps_order
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.choose import choose_transport, device_kind
from cocodiff_compile.devices.cpu import CPU
from cocodiff_compile.devices.installed import installed_here
from cocodiff_compile.ranks.detect import location_of_this_rank
from tests.support.captured import fake_ranks
from tests.support.hand_written import WIDTH, Block
from tests.support.slow_links import slow_links

COUNTS = installed_here().device_counts


def _kinds(*cpu_marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    params = [pytest.param("cpu", marks=cpu_marks)]
    for kind, mark in (("xpu", pytest.mark.xpu), ("cuda", pytest.mark.cuda)):
        absent = pytest.mark.skipif(kind not in COUNTS, reason=f"torch sees no {kind} device")
        params.append(pytest.param(kind, marks=(mark, absent)))
    return pytest.mark.parametrize("kind", params)


@_kinds()
def test_ranks_of_it_have_something_to_talk_over(kind: str) -> None:
    chosen = choose_transport(device_kind(kind), installed_here(), None, {})
    assert not chosen.on_request


@_kinds()
def test_it_says_where_it_is_and_what_it_costs(kind: str) -> None:
    places = [location_of_this_rank(torch.device(kind, n)) for n in range(COUNTS.get(kind, 1))]
    assert {place.device_type for place in places} == {kind}
    if kind != "cpu":
        assert all(place.card and place.device_name for place in places)
        per_card = len(places) / len({place.card for place in places})
        assert per_card in (1, 2), "tiles of a card are told by their uuid"


@_kinds()
def test_inductors_code_keeps_the_order_of_the_graph(kind: str, tmp_path: Path) -> None:
    """The process group is fake, the device is not: what the code computes is junk."""
    kinds: list[str] = []

    def keep(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        kinds.extend(graph_kinds(gm.graph))
        return compile_fx_inner(gm, *args, **kwargs)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, config, keep, dry_run=True, device=CPU.guess)

    torch._dynamo.reset()
    options = {"topology": slow_links(tmp_path / "slow.json"), "head_chunks": 1, "token_chunks": 1}
    config = CompileConfig.from_options(options)
    with fake_ranks(2), torch.no_grad():
        model = Block().eval().to(kind)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        _, (code,) = run_and_get_code(compiled, torch.ones(1, 64, WIDTH, device=kind))
    assert kinds.count("all_to_all_single") == 4
    assert keeps_order(code, kinds) is True


@_kinds(pytest.mark.slow, pytest.mark.gloo)
@pytest.mark.timeout(900)
def test_the_check_on_two_of_them_is_close_to_one_process(kind: str, tmp_path: Path) -> None:
    if kind != "cpu" and COUNTS[kind] < 2:
        pytest.skip(f"one {kind} device, two ranks need two")
    file = tmp_path / "check.json"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "cocodiff_compile.cli", "check", "--steps", "2", "--json", str(file)]
    # Settings of a batch job are for its mpiexec: torchrun's ranks have none to ask.
    own = {name: value for name, value in os.environ.items() if not name.startswith("CCL_")}
    own |= {"CCL_PROCESS_LAUNCHER": "none", "CCL_ATL_TRANSPORT": "ofi"} if kind == "xpu" else {}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=own
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["ok"]
    assert f"2 ranks started by torchrun, {kind}" in done.stdout
