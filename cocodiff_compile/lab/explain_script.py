# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff explain SCRIPT.py`: runs a script on one fake rank of many, and reports what
the backend would do with every model that the script compiles with it.

Nothing that is compiled is computed, no code is generated, and no other process is started: the
process group that the script joins is a fake one, whose collectives return at once. What the script
computes outside of compiled models, it computes on one rank.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import distributed as dist

from cocodiff_compile.compiler.dry_run import dry_run
from cocodiff_compile.compiler.explain import Explanation
from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.collect import collect_reports


def add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="run a script that compiles with cocodiff, without a cluster, and report what would "
        "be done",
        description="Runs the script as one rank of many. Compiled models return zeros, and "
        "process groups are fake; what is not compiled is computed.",
    )
    explain.add_argument("--ranks", type=int, default=4, help="the number of ranks (default: 4)")
    explain.add_argument(
        "--ranks-per-node", type=int, help="ranks of a node (default: all are on one)"
    )
    explain.add_argument(
        "--out",
        type=Path,
        default=Path("build/explain"),
        metavar="DIR",
        help="the folder for the page (default: build/explain)",
    )
    explain.add_argument("script", type=Path, metavar="SCRIPT.py")
    explain.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    explain.set_defaults(run=run_explain)


def run_explain(parsed: argparse.Namespace) -> int:
    """Runs the script and writes the page; returns the exit status, 1 if the script failed."""
    per_node = parsed.ranks_per_node or parsed.ranks
    if parsed.ranks < 2 or per_node < 1 or parsed.ranks % per_node:
        raise UserError(
            f"--ranks {parsed.ranks}, --ranks-per-node {per_node}; allowed: at least 2 ranks, and "
            "a number of ranks per node that divides them"
        )
    if not parsed.script.is_file():
        raise UserError(f"there is no script {parsed.script}")
    explanation, failure = explain_script(
        parsed.script, parsed.arguments, _rank_variables(parsed.ranks, per_node)
    )
    print(f"\n{explanation}\n")
    page = parsed.out / "index.html"
    explanation.write_page(page)
    print(f"written: {page}")
    if failure:
        print(f"\n{parsed.script} failed; what it had compiled before is above:\n{failure}")
    return 1 if failure else 0


def explain_script(
    script: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> tuple[Explanation, str]:
    """Returns what the script compiled, and the traceback if it failed; with the environment
    `variables` of its rank.
    """
    failure = ""
    with _as_a_rank(script, arguments, variables), collect_reports() as reports:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            failure = "" if not ended.code else f"it ended with status {ended.code}"
        except Exception:
            failure = traceback.format_exc()
    return Explanation(tuple(reports)), failure


def _rank_variables(num_ranks: int, per_node: int) -> dict[str, str]:
    return {
        "RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


@contextmanager
def _as_a_rank(
    script: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> Iterator[None]:
    """A context in which a script runs dry, as one rank of a fake process group that is there
    before it joins and after it leaves.
    """
    path = [str(script.resolve().parent), *sys.path]
    argv = [str(script), *arguments]
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", path),
        fake_ranks(int(variables["WORLD_SIZE"])),
        mock.patch.object(dist, "init_process_group", _already_joined),
        mock.patch.object(dist, "destroy_process_group", _already_joined),
        dry_run(),
    ):
        yield


def _already_joined(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for joining and leaving the process group of a dry run."""
