"""Implements `cocodiff bench`: parses arguments, runs the cases, writes tables, JSON and plots."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles
from cocodiff_compile.topology.read_plain_data import write_atomically

MODELS = ("flux", "sd3.5", "qwen-image", "wan")
SHARES = (30, 50, 75, 90)
GRIDS = ("2x1", "2x2", "4x2")
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
    """Adds the command. Its dependencies are imported when it runs."""
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
    bench.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
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
    """Returns the exit status: 2 for an error that the user can fix, 1 if a case could not be
    measured.
    """
    try:
        if parsed.compare:
            return _compare(*parsed.compare)
        avoid_broken_tiles()
        return _measure(parsed)
    except UserError as error:
        print(f"cocodiff bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the cluster and all its processes were removed", file=sys.stderr)
        return 130


def _compare(old: Path, new: Path) -> int:
    from cocodiff_compile.lab.bench.compare import compare_reports  # noqa: PLC0415
    from cocodiff_compile.lab.bench.results import Report  # noqa: PLC0415

    print(compare_reports(Report(_load(old)), Report(_load(new))))
    return 0


def _load(path: Path) -> dict[str, Any]:
    from cocodiff_compile.lab.bench.machine import SCHEMA  # noqa: PLC0415

    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UserError(f"{path} was not written by this version of cocodiff bench; measure again")
    return data


def _measure(parsed: argparse.Namespace) -> int:
    from cocodiff_compile.ranks.launch.launchers import adopt_launcher  # noqa: PLC0415

    need_package("diffusers", "diffusers")
    need_package("matplotlib", "plots")
    launch = adopt_launcher(os.environ)
    if launch is not None and launch.num_ranks > 1:
        return _measure_here(parsed)
    from cocodiff_compile.lab.bench.run import run_cases  # noqa: PLC0415
    from cocodiff_compile.lab.cluster import check_can_emulate  # noqa: PLC0415
    from cocodiff_compile.lab.progress import timed_sayer  # noqa: PLC0415

    cases = find_cases(parsed)
    check_can_emulate()
    file = _results_file(parsed.out)
    done = _load(file)["results"] if parsed.resume and file.exists() else ()
    run = run_cases(cases, timed_sayer(), done, lambda run: _keep(run, file))
    return _put_out(run, parsed.out)


def _measure_here(parsed: argparse.Namespace) -> int:
    """Measures as one of the ranks that a launcher started."""
    from cocodiff_compile.lab.bench.rank import measure_here  # noqa: PLC0415

    file = _results_file(parsed.out)
    ignored = [name for name in ("grids", "shares", "rates", "resume") if getattr(parsed, name)]
    if ignored and os.environ["RANK"] == "0":
        options = ", ".join(f"--{name}" for name in ignored)
        print(f"cocodiff bench: {options} ignored: the launcher determines ranks and links")
    run = measure_here(lambda grid: find_cases(parsed, grid), lambda run: _keep(run, file))
    return 0 if run is None else _put_out(run, parsed.out)


def find_cases(parsed: argparse.Namespace, grid: str | None = None) -> list[Any]:
    """Returns the cases that the arguments ask for. `grid` is given where a launcher has fixed
    it.
    """
    from cocodiff_compile.lab.bench.cases import (  # noqa: PLC0415
        DTYPES,
        MIN_REPEATS,
        WORKLOADS,
        Case,
        Grid,
    )
    from cocodiff_compile.lab.bench.variants import STOCK, VARIANTS  # noqa: PLC0415

    if parsed.repeats < MIN_REPEATS:
        raise UserError(f"--repeats {parsed.repeats}; allowed: {MIN_REPEATS} or more")
    models = _chosen(parsed, "models", WORKLOADS, MODELS)
    dtypes = _chosen(parsed, "dtypes", DTYPES)
    variants = _chosen(parsed, "variants", VARIANTS)
    if STOCK not in variants:
        raise UserError(f"--variants must include {STOCK!r}, with which the others are compared")
    grids = [Grid.parse(text) for text in ([grid] if grid else _list(parsed, "grids") or GRIDS)]
    if not grid and any(item.nodes == 1 for item in grids):
        raise UserError("--grids: an emulated cluster has 2 nodes or more, as in 2x1")
    rates = _numbers(parsed, "rates", 0.1, 100_000)
    shares = () if rates else _numbers(parsed, "shares", 1, 99) or SHARES
    return [
        Case(
            WORKLOADS[model].of_dtype(dtype).for_ranks(ranks_grid.num_ranks),
            ranks_grid,
            tuple(variants),
            tuple(int(share) for share in shares),
            tuple(rates),
            parsed.repeats,
            parsed.timeline,
        )
        for model, dtype, ranks_grid in itertools.product(models, dtypes, grids)
    ]


def _list(parsed: argparse.Namespace, name: str) -> list[str]:
    presets = [_PRESETS[preset] for preset in _PRESETS if getattr(parsed, preset)]
    text = getattr(parsed, name) or next((preset.get(name, "") for preset in presets), "")
    return [item.strip() for item in text.split(",") if item.strip()]


def _chosen(
    parsed: argparse.Namespace,
    name: str,
    allowed: Iterable[str],
    default: Sequence[str] | None = None,
) -> list[str]:
    known = list(allowed)
    chosen = _list(parsed, name) or list(default or known)
    if unknown := [item for item in chosen if item not in known]:
        raise UserError(f"--{name} {', '.join(unknown)}; allowed: {', '.join(known)}")
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
    from cocodiff_compile.lab.bench.plot import plot_report  # noqa: PLC0415
    from cocodiff_compile.lab.bench.results import Report  # noqa: PLC0415
    from cocodiff_compile.lab.bench.table import format_report  # noqa: PLC0415
    from cocodiff_compile.lab.bench.timeline import draw_timelines  # noqa: PLC0415

    report = Report(run)
    if any(point.profiled_steps for point in report.points):
        written = draw_timelines(report, folder)
    else:
        print("\n" + format_report(report))
        written = plot_report(report, folder)
    for path in written:
        print(f"written: {path}")
    return 1 if report.failures else 0
