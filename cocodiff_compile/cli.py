# SPDX-License-Identifier: Apache-2.0
"""The `cocodiff` command."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cocodiff_compile import __version__
from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.given_values import shown
from cocodiff_compile.lab.bench.command import add_bench
from cocodiff_compile.lab.command import add_lab
from cocodiff_compile.lab.coverage.command import add_coverage
from cocodiff_compile.lab.demo.command import add_demo
from cocodiff_compile.lab.doctor.command import add_doctor
from cocodiff_compile.lab.explain_script import add_explain
from cocodiff_compile.lab.quality.command import add_quality
from cocodiff_compile.lab.show_topology import find_topology, format_topology
from cocodiff_compile.lab.simulate.command import add_simulate
from cocodiff_compile.ranks.launch.matrix_tiles import avoid_broken_tiles
from cocodiff_compile.ranks.live_topology import live_topology_under_launcher
from cocodiff_compile.topology.axes import Topology
from cocodiff_compile.topology.draw import draw_topology
from cocodiff_compile.topology.files import topology_data


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses and runs one command; returns the exit status, 2 for what the user can fix."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except UserError as error:
        print(f"cocodiff {parsed.command}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cocodiff",
        description="A torch.compile backend that runs diffusion transformers on many devices with "
        "Ulysses sequence parallelism.",
    )
    parser.add_argument("--version", action="version", version=f"cocodiff {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    add_demo(commands)
    _add_check(commands)
    add_explain(commands)
    add_doctor(commands)
    _add_topology(commands)
    add_simulate(commands)
    add_bench(commands)
    add_quality(commands)
    add_coverage(commands)
    add_lab(commands)
    return parser


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from cocodiff_compile.lab.small_models import SMALL_MODELS  # noqa: PLC0415

    check = commands.add_parser(
        "check",
        help="denoise with a small model on 4 local gloo ranks, or on those of a launcher, and "
        "compare with one process",
    )
    check.add_argument("--model", choices=sorted(SMALL_MODELS), default="flux")
    check.add_argument("--steps", type=_positive, default=4, help="denoising steps (default: 4)")
    check.add_argument(
        "--json", type=_file_in_a_folder, metavar="FILE", help="write the table to FILE as JSON"
    )
    check.add_argument(
        "--debug-dir", type=Path, metavar="DIR", help="write every rank's graphs below DIR"
    )
    check.set_defaults(run=_run_check)


def _add_topology(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    topology = commands.add_parser(
        "topology", help="show a machine's axes and links, and how exchanges would be phased on it"
    )
    topology.add_argument(
        "source",
        metavar="PRESET|FILE|auto",
        help="aurora, dgx-h100, flat, a file, or auto (under a launcher: detect and measure)",
    )
    topology.add_argument("--ranks", type=_positive, help="ranks of the Ulysses group")
    topology.add_argument(
        "--draw", type=_file_in_a_folder, metavar="FILE", help="draw it to FILE (.png or .svg)"
    )
    topology.add_argument(
        "--save", type=_file_in_a_folder, metavar="FILE", help="write it to FILE as JSON"
    )
    topology.set_defaults(run=_run_topology)


def _run_topology(parsed: argparse.Namespace) -> int:
    try:
        if parsed.source == "auto":
            live = live_topology_under_launcher()
            topology, notes = live.topology, live.notes
            if live.rank:
                return 0
        else:
            topology, notes = find_topology(parsed.source, parsed.ranks), ()
        if parsed.ranks:
            topology.for_ranks(parsed.ranks)
        _put_out_topology(parsed, topology, notes)
    except OSError as error:  # of --draw or --save
        raise UserError(str(error)) from None
    return 0


def _put_out_topology(parsed: argparse.Namespace, topology: Topology, notes: Sequence[str]) -> None:
    print("\n\n".join((format_topology(topology), *notes)))
    if parsed.draw:
        draw_topology(topology, parsed.draw)
    if parsed.save:
        parsed.save.write_text(json.dumps(topology_data(topology), indent=2) + "\n")


def _positive(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text) is None or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from 1")
    return int(text)


def _file_in_a_folder(text: str) -> Path:
    path = Path(text)
    try:
        is_there = path.absolute().parent.is_dir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {error.strerror}") from None
    if not is_there:
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}")
    return path


def _run_check(parsed: argparse.Namespace) -> int:
    need_package("diffusers", "diffusers")
    from cocodiff_compile.lab.check import CheckSettings, run_check  # noqa: PLC0415

    avoid_broken_tiles()
    debug_dir = str(parsed.debug_dir) if parsed.debug_dir else None
    settings = CheckSettings(model=parsed.model, steps=parsed.steps, debug_dir=debug_dir)
    try:
        return run_check(settings, parsed.json)
    except KeyboardInterrupt:
        print("\ninterrupted; all ranks were ended")
        return 130


if __name__ == "__main__":
    sys.exit(main())
