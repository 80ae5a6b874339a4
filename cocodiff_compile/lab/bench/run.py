# SPDX-License-Identifier: Apache-2.0
"""Runs cases, each on an emulated cluster of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff_compile.lab.bench.cases import Case, Grid
from cocodiff_compile.lab.bench.links import LINKS_VARIABLE
from cocodiff_compile.lab.bench.machine import new_run
from cocodiff_compile.lab.bench.rank import FAILURE_FILE
from cocodiff_compile.lab.cluster import NodeLink, emulated_cluster
from cocodiff_compile.lab.local_ranks import RankFailedError
from cocodiff_compile.lab.nodes import run_on_nodes
from cocodiff_compile.lab.progress import Say, pass_on

_CASE_TIMEOUT_S = 4 * 3600.0


def run_cases(
    cases: Sequence[Case], say: Say, done: Sequence[dict[str, Any]], keep: Callable[[Any], None]
) -> dict[str, Any]:
    """Returns the run as JSON data, and passes it to `keep` after every case.

    Cases in `done`, the results of an earlier run, are not run again if they were taken with the
    same code and versions. A case that fails records the reason, and the next one runs.
    """
    run = new_run()
    known = {
        json.dumps(item["case"]): item
        for item in done
        if "points" in item and item["taken with"] == run["taken with"]
    }
    for number, case in enumerate(cases, start=1):
        key = json.dumps(case.to_json())
        say(f"case {number} of {len(cases)}: {case.title}")
        if key in known:
            say("  taken from the earlier run")
        result = known.get(key) or run_case(case, lambda text: say(f"  {text}"))
        result["taken with"] = run["taken with"]
        run["results"].append(result)
        keep(run)
    return run


def run_case(case: Case, say: Say) -> dict[str, Any]:
    """Runs one case on an emulated cluster, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        try:
            run_on_cluster(
                case.grid,
                "cocodiff_compile.lab.bench.rank",
                case.to_json(),
                result_file,
                say,
                name="bench",
                timeout_s=_CASE_TIMEOUT_S,
            )
        except RankFailedError as error:
            files = sorted(Path(folder).glob(FAILURE_FILE.format("*")))
            failure = "\n".join(file.read_text() for file in files) or str(error)
            say(f"failed: {failure}")
            return {"case": case.to_json(), "failure": failure}
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


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
    """Runs `python -m module GIVEN RESULT` on every rank of an emulated cluster, which is removed
    afterwards. `given` is passed as a JSON file next to the result.
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
