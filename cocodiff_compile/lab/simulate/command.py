# SPDX-License-Identifier: Apache-2.0
"""`cocodiff simulate`: arguments in, tables and files out."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.given_values import shown
from cocodiff_compile.lab.simulate.microbenchmark import Figure, format_microbenchmark, reproduce
from cocodiff_compile.lab.simulate.plot import check_plot, plot_simulation
from cocodiff_compile.lab.simulate.run import SimulateSettings, simulate
from cocodiff_compile.lab.simulate.tables import format_simulation, simulation_data, trace_data


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="simulate a step of a published model on a machine, flat and in phases",
    )
    simulate.add_argument(
        "--topology", default="aurora", help="aurora (default), dgx-h100, flat, or a file"
    )
    simulate.add_argument(
        "--nodes", default="1", metavar="N[,N...]", help="such as 1,2,4,8 (default: 1)"
    )
    simulate.add_argument(
        "--model",
        default="qwen-image",
        help="qwen-image (default), flux, flux2, sd3.5 or wan",
    )
    simulate.add_argument(
        "--resolution", type=int, default=1536, help="pixels per edge (default: 1536)"
    )
    simulate.add_argument("--ulysses-degree", type=int, help="default: all ranks, 48 at most")
    simulate.add_argument("--device", help="aurora-tile or h100; default: that of the topology")
    simulate.add_argument("--layers", type=int, help="use at most this many blocks of each kind")
    simulate.add_argument(
        "--all-plans", action="store_true", help="list every way to split exchanges into phases"
    )
    simulate.add_argument("--microbenchmark", action="store_true", help="print nothing else")
    for name, what in (("json", "the figures"), ("trace", "the timelines"), ("plot", "a picture")):
        simulate.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what} to FILE")
    simulate.set_defaults(run=run_simulate)


def run_simulate(parsed: argparse.Namespace) -> int:
    nodes = parse_nodes(parsed.nodes)
    _check(parsed)
    figures = reproduce() if parsed.microbenchmark or parsed.topology == "aurora" else []
    if figures:
        print("micro-benchmark, the only thing Aurora's links are fitted to")
        print(format_microbenchmark(figures), end="\n\n", flush=True)
    if not parsed.microbenchmark:
        _simulate_model(parsed, nodes, figures)
    return 0


def parse_nodes(text: str) -> tuple[int, ...]:
    """Returns the numbers of `1,2,4`. Raises UserError for anything else."""
    parts = text.split(",")
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        raise UserError(f"--nodes is {shown(text)}; allowed: whole numbers from 1, such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def _check(parsed: argparse.Namespace) -> None:
    """Raises UserError for what would fail after minutes of work."""
    for name in ("ulysses_degree", "layers"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise UserError(f"--{option} is {value}; allowed: a whole number from 1")
    for name in ("json", "trace", "plot"):
        path = getattr(parsed, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"--{name} {path}: there is no folder {path.absolute().parent}")
    if parsed.plot is not None:
        check_plot(parsed.plot)


def _simulate_model(
    parsed: argparse.Namespace, nodes: tuple[int, ...], figures: list[Figure]
) -> None:
    need_package("diffusers", "diffusers")
    settings = SimulateSettings(
        topology=parsed.topology,
        nodes=nodes,
        model=parsed.model,
        resolution=parsed.resolution,
        degree=parsed.ulysses_degree,
        max_layers=parsed.layers,
        device=parsed.device,
        all_plans=parsed.all_plans,
    )
    result = simulate(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(format_simulation(result))
    if parsed.json:
        parsed.json.write_text(json.dumps(simulation_data(result, figures), indent=1))
    if parsed.trace:
        parsed.trace.write_text(json.dumps(trace_data(result)))
    if parsed.plot:
        plot_simulation(result, parsed.plot)
