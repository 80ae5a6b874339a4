"""Runs a module on every rank of an emulated cluster, which is removed afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocodiff_compile.lab.bench.cases import Grid
from cocodiff_compile.lab.bench.links import LINKS_VARIABLE
from cocodiff_compile.lab.cluster import NodeLink, emulated_cluster
from cocodiff_compile.lab.nodes import run_on_nodes
from cocodiff_compile.lab.progress import Say, pass_on


def run_on_cluster(
    grid: Grid,
    module: str,
    given: Mapping[str, Any],
    result_file: Path,
    say: Say,
    *,
    name: str,
    timeout_s: float,
) -> None:
    """Runs `python -m module GIVEN RESULT` under torchrun. `given` is passed as a JSON file next to
    the result.
    """
    given_file = result_file.with_suffix(".given.json")
    given_file.write_text(json.dumps(given))
    with emulated_cluster(f"{name}{os.getpid()}", grid.nodes, NodeLink()) as cluster:
        run_on_nodes(
            cluster,
            grid.tiles,
            ["-m", module, str(given_file), str(result_file)],
            on_line=lambda _node, line: pass_on(line, say),
            timeout_s=timeout_s,
            environment={LINKS_VARIABLE: "1"},
        )
