# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff bench`: parses arguments, runs the cases, writes tables, JSON and plots."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.lab.bench.cases import DTYPES, MIN_REPEATS, WORKLOADS, Case, Grid
from cocodiff_compile.lab.bench.machine import SCHEMA
from cocodiff_compile.lab.bench.page import write_bench_page
from cocodiff_compile.lab.bench.plot import draw_timelines, plot_report
from cocodiff_compile.lab.bench.rank import measure_here
from cocodiff_compile.lab.bench.results import Report
from cocodiff_compile.lab.bench.run import run_cases
from cocodiff_compile.lab.bench.table import compare_reports, format_report
from cocodiff_compile.lab.bench.variants import STOCK, VARIANTS
from cocodiff_compile.lab.cluster import check_can_emulate
from cocodiff_compile.lab.progress import timed_sayer
from cocodiff_compile.ranks.launch.launchers import adopt_launcher
from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles
from cocodiff_compile.topology.read_plain_data import write_atomically

_DEFAULTS = {"models": "flux,sd3.5,qwen-image,wan", "grids": "2x1,2x2,4x2", "shares": "30,50,75,90"}
_PRESETS = {
    "quick": {
        "models": "flux-short",
        "dtypes": "fp32",
        "grids": "2x1,2x2",
        "shares": "55,75",
        "variants": "inductor,cache-dit,cocodiff",
    },
    "timeline": {
        "models": "flux",
        "dtypes": "fp32",
        "grids": "2x1",
        "shares": "75",
        "variants": "inductor,cocodiff",
    },
}
"""The defaults of the list options, by preset."""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure a step over slow links: stock, rivals and cocodiff, each with the limit",
        description="Runs on an emulated cluster, which requires root. If started by torchrun "
        "or mpiexec, it measures the launched ranks on their own links instead.",
    )
    bench.add_argument(
        "--quick", action="store_true", help="measure a short FLUX on two grids, three variants"
    )
    bench.add_argument(
        "--timeline",
        action="store_true",
        help="profile one step of every variant and draw it, instead of measuring",
    )
    lists = {
        "models": "flux,sd3.5,qwen-image,wan, or flux-short",
        "dtypes": "fp32,bf16",
        "grids": "nodes x tiles: 2x1,2x2,4x2",
        "shares": "set links so that communication is A, B per cent of a stock step: 30,50,75,90",
        "rates": "set links to A, B Mbit/s, instead of shares",
        "variants": "the variants to compare; default: all",
    }
    for name, text in lists.items():
        bench.add_argument(f"--{name}", metavar="A,B", help=text)
    bench.add_argument(
        "--repeats", type=int, default=8, help="the number of rounds, at least 8 (the default)"
    )
    bench.add_argument(
        "--out",
        type=Path,
        default=Path("build/bench"),
        metavar="DIR",
        help="the folder for results (default: build/bench)",
    )
    bench.add_argument(
        "--resume", action="store_true", help="keep the cases that DIR/results.json already has"
    )
    bench.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("OLD", "NEW"),
        help="compare two results.json without running anything",
    )
    bench.set_defaults(run=run_bench)


def run_bench(parsed: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a case could not be measured."""
    if parsed.compare:
        print(compare_reports(*(Report(_load(file)) for file in parsed.compare)))
        return 0
    avoid_broken_tiles()
    try:
        return _measure(parsed)
    except KeyboardInterrupt:
        print("\ninterrupted; the cluster and all its processes were removed", file=sys.stderr)
        return 130


def _load(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UserError(f"{path} was not written by this version of cocodiff bench; measure again")
    return data


def _measure(parsed: argparse.Namespace) -> int:
    need_package("diffusers", "diffusers")
    need_package("matplotlib", "plots")
    launch = adopt_launcher(os.environ)
    if launch is not None and launch.num_ranks > 1:
        return _measure_here(parsed)
    cases = find_cases(parsed)
    check_can_emulate()
    file = _results_file(parsed.out)
    done = _load(file)["results"] if parsed.resume and file.exists() else ()
    run = run_cases(cases, timed_sayer(), done, lambda run: _keep(run, file))
    return _put_out(run, parsed.out)


def _measure_here(parsed: argparse.Namespace) -> int:
    """Measures as one of the ranks that a launcher started."""
    file = _results_file(parsed.out)
    ignored = [name for name in ("grids", "shares", "rates", "resume") if getattr(parsed, name)]
    if ignored and os.environ["RANK"] == "0":
        options = ", ".join(f"--{name}" for name in ignored)
        print(f"cocodiff bench: {options} ignored: the launcher determines ranks and links")
    run = measure_here(lambda grid: find_cases(parsed, grid), lambda run: _keep(run, file))
    return 0 if run is None else _put_out(run, parsed.out)


def find_cases(parsed: argparse.Namespace, grid: str | None = None) -> list[Case]:
    """Returns the cases that the arguments ask for, on `grid` where a launcher has fixed it."""
    if parsed.repeats < MIN_REPEATS:
        raise UserError(f"--repeats {parsed.repeats}; allowed: {MIN_REPEATS} or more")
    models = _chosen(parsed, "models", WORKLOADS)
    dtypes = _chosen(parsed, "dtypes", DTYPES)
    variants = _chosen(parsed, "variants", VARIANTS)
    if STOCK not in variants:
        raise UserError(f"--variants must include {STOCK!r}, with which the others are compared")
    grids = [Grid.parse(text) for text in ([grid] if grid else _list(parsed, "grids"))]
    if not grid and any(item.nodes == 1 for item in grids):
        raise UserError("--grids: an emulated cluster has 2 nodes or more, as in 2x1")
    rates = _numbers(parsed, "rates", 0.1, 100_000)
    shares = () if rates else _numbers(parsed, "shares", 1, 99)
    return [
        Case(
            replace(WORKLOADS[model], dtype=dtype).for_ranks(ranks_grid.num_ranks),
            ranks_grid,
            tuple(variants),
            tuple(int(share) for share in shares),
            rates,
            parsed.repeats,
            parsed.timeline,
        )
        for model, dtype, ranks_grid in itertools.product(models, dtypes, grids)
    ]


def _list(parsed: argparse.Namespace, name: str) -> list[str]:
    """Returns what was asked for, else what a preset asks for, else the default."""
    presets = [_PRESETS[preset] for preset in _PRESETS if getattr(parsed, preset)]
    texts = [getattr(parsed, name) or "", *(each.get(name, "") for each in (*presets, _DEFAULTS))]
    lists = ([item.strip() for item in text.split(",") if item.strip()] for text in texts)
    return next(filter(None, lists), [])


def _chosen(parsed: argparse.Namespace, name: str, allowed: Collection[str]) -> list[str]:
    chosen = _list(parsed, name) or list(allowed)
    if unknown := [item for item in chosen if item not in allowed]:
        raise UserError(f"--{name} {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return chosen


def _numbers(parsed: argparse.Namespace, name: str, least: float, most: float) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, _list(parsed, name)))
    except ValueError:
        numbers = (0.0,)
    if not all(least <= number <= most for number in numbers):
        raise UserError(
            f"--{name} {getattr(parsed, name)}; allowed: numbers from {least:g} to {most:g}"
        )
    return numbers


def _results_file(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: {error}") from None
    return folder / "results.json"


def _keep(run: dict[str, Any], file: Path) -> None:
    write_atomically(file, json.dumps(run, indent=1) + "\n")


def _put_out(run: dict[str, Any], folder: Path) -> int:
    report = Report(run)
    if any(point.profiled_steps for point in report.points):
        written = draw_timelines(report, folder)
    else:
        print("\n" + format_report(report))
        written = plot_report(report, folder)
        page = folder / "index.html"
        write_bench_page(report, written, page)
        written.append(page)
    for path in written:
        print(f"written: {path}")
    return 1 if report.failures else 0
