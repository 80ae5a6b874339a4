# SPDX-License-Identifier: Apache-2.0
"""Parses the arguments of `cocodiff demo`, runs it, and shows what came of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.lab.bench.cases import Grid
from cocodiff_compile.lab.cluster import check_can_emulate
from cocodiff_compile.lab.demo.one_process import draw_in_one_process
from cocodiff_compile.lab.demo.outcome import Outcome
from cocodiff_compile.lab.demo.show import write_files
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.progress import Say, timed_sayer, while_waiting
from cocodiff_compile.lab.quality.command import local_rank, on_emulated_cluster
from cocodiff_compile.lab.quality.settings import PASSES, QualitySettings
from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles

NUM_NODES = 2
LOSSY = "int3from8"
"""The policy of V-Major: 3 bits per element, and 8 in the first step."""
RATE_MBIT = 200
"""The rate of the slow link, at which exchanges take most of a stock step."""
_TIMEOUT_S = 1800


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="draw pictures over a slow link: stock Inductor, exact passes and V-Major, compared",
        description="Draws pictures with a small FLUX that was trained for it: in one process, and "
        "on two nodes of an emulated cluster (needs root; else two ranks over loopback) compiled "
        "by stock Inductor, by cocodiff exactly, and by cocodiff with V-Major, interleaved.",
    )
    demo.add_argument("--steps", type=int, default=8, help="denoising steps (default: 8)")
    demo.add_argument("--batch", type=int, default=8, help="pictures drawn at once (default: 8)")
    demo.add_argument("--rounds", type=int, default=2, help="interleaved rounds (default: 2)")
    demo.add_argument(
        "--loopback", action="store_true", help="run over loopback, without an emulated cluster"
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        metavar="DIR",
        help="the folder for results (default: build/demo)",
    )
    demo.set_defaults(run=run_demo)


def run_demo(parsed: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status, 0 if all pictures are as near as they must be."""
    avoid_broken_tiles()
    for package in ("diffusers", "matplotlib", "skimage"):
        need_package(package, "quality")
    why_loopback = "asked for" if parsed.loopback else _why_no_cluster()
    settings = _settings(parsed, None if why_loopback else RATE_MBIT)
    try:
        parsed.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {parsed.out}: {error.strerror}") from None
    say = timed_sayer()
    say(
        "a small FLUX that was trained to draw two shapes; the plain model, sharded by the compiler"
    )
    try:
        one_process = draw_in_one_process(settings, say)
        outcome = Outcome(one_process, _on_ranks(settings, why_loopback, say))
    except KeyboardInterrupt:
        print("\ninterrupted; all ranks were ended")
        return 130
    say("drawing pictures, timelines and the page")
    files = write_files(outcome, parsed.out)
    print("\n" + outcome.format() + "\n")
    for what, file in files.items():
        print(f"{what}: {file}")
    return 0 if outcome.is_near_enough else 1


def _settings(parsed: argparse.Namespace, rate_mbit: float | None) -> QualitySettings:
    return QualitySettings(
        policies=(PASSES, LOSSY),
        pictures=parsed.batch * parsed.rounds,
        steps=parsed.steps,
        batch=parsed.batch,
        rate_mbit=rate_mbit,
        ready_steps=2,
        chunks=False,
        is_profiled=True,
        debug_dir=str((parsed.out / "compile").absolute()),
        decisions=str((parsed.out / "decisions").absolute()),
    )


def _why_no_cluster() -> str:
    """Returns why no cluster can be emulated here; nothing if one can."""
    try:
        check_can_emulate()
    except UserError as error:
        return str(error)
    return ""


def _on_ranks(settings: QualitySettings, why_loopback: str, say: Say) -> dict[str, Any]:
    with while_waiting(say) as say_what_is_waited_for:
        if not why_loopback:
            say(f"{NUM_NODES} emulated nodes of one rank, real gloo traffic over a slow link")
            return on_emulated_cluster(settings, Grid(NUM_NODES, 1), say_what_is_waited_for)
        say(f"{NUM_NODES} ranks over loopback, where nothing is gained: {why_loopback}")
        result: dict[str, Any]
        result, *_ = run_local_ranks(
            local_rank,
            NUM_NODES,
            settings,
            timeout_s=_TIMEOUT_S,
            on_message=lambda rank, text: say_what_is_waited_for(text) if rank == 0 else None,
        )
        return result
