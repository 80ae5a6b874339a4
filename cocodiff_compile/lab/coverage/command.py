# SPDX-License-Identifier: Apache-2.0
"""`cocodiff coverage`: class names in, a table out."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from cocodiff_compile.errors import UserError, need_package
from cocodiff_compile.lab.coverage.examine import LARGEST_ERROR, Examined, examine

log = logging.getLogger(__name__)


def add_coverage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    coverage = commands.add_parser(
        "coverage", help="try which transformers of diffusers are shared out, over simulated ranks"
    )
    coverage.add_argument(
        "--classes", nargs="+", metavar="NAME", help="classes, or parts of their names"
    )
    coverage.add_argument("--ranks", type=int, default=4, help="simulated ranks (default: 4)")
    coverage.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table to FILE as Markdown"
    )
    coverage.set_defaults(run=run_coverage)


def run_coverage(parsed: argparse.Namespace) -> int:
    """Prints a row per class; returns 1 if a class gives wrong values."""
    need_package("diffusers", "diffusers")
    from cocodiff_compile.lab.coverage.classes import build, transformer_classes  # noqa: PLC0415

    if parsed.ranks < 2:
        raise UserError(f"--ranks is {parsed.ranks}; allowed: a whole number from 2")
    names = _chosen(transformer_classes(), parsed.classes)
    rows: list[Examined] = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", end=": ", flush=True)
        rows.append(_examined(name, build, parsed.ranks))
        print(_outcome(rows[-1]), f"({rows[-1].seconds:.1f} s)", flush=True)
    print(f"\n{summary(rows)}")
    if parsed.markdown:
        parsed.markdown.write_text(markdown(rows, parsed.ranks))
    return int(any(map(is_wrong, rows)))


def _chosen(known: Sequence[str], asked: Sequence[str] | None) -> list[str]:
    if not asked:
        return list(known)
    for text in asked:
        if not any(text.lower() in name.lower() for name in known):
            raise UserError(f"--classes {text}: no transformer class of diffusers has that name")
    return [name for name in known if any(text.lower() in name.lower() for text in asked)]


def _examined(name: str, build: object, num_ranks: int) -> Examined:
    assert callable(build)
    try:
        model, inputs = build(name)
    except UserError as error:
        return Examined(name, reason=str(error))
    return examine(name, model, inputs, num_ranks)


def is_wrong(row: Examined) -> bool:
    return row.is_shared and not row.error <= LARGEST_ERROR


def _attentions(row: Examined) -> str:
    return ", ".join(f"{count} {mode}" for mode, count in sorted(row.modes.items()))


def _outcome(row: Examined) -> str:
    if not row.is_shared:
        return row.reason
    graphs = f" in {row.num_graphs} graphs" if row.num_graphs > 1 else ""
    what = f"{_attentions(row)} of {row.num_attentions} attentions{graphs}"
    wrong = "WRONG, " if is_wrong(row) else ""
    return f"{wrong}{what}, {row.num_sites} sites, {row.num_gathers} gathers, error {row.error:.1e}"


def summary(rows: Sequence[Examined]) -> str:
    """Returns one sentence about all classes."""
    shared = [row for row in rows if row.is_shared]
    wrong = sum(map(is_wrong, rows))
    largest = max((row.error for row in shared), default=0.0)
    return (
        f"{len(shared)} of {len(rows)} classes are shared out, largest error {largest:.1e}, "
        f"{wrong} wrong; {len(rows) - len(shared)} are declined"
    )


def markdown(rows: Sequence[Examined], num_ranks: int) -> str:
    """Returns the table for docs/models.md."""
    lines = [
        f"{summary(rows)} ({num_ranks} simulated ranks, torch {torch.__version__}).",
        "",
        "| class | attentions | shared out | graphs | gathers | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.is_shared:
            outcome = f"{_attentions(row)} | {row.num_graphs} | {row.num_gathers} | {row.error:.1e}"
        else:
            outcome = f"no: {row.reason.replace('|', ' ')} | {row.num_graphs} | | "
        lines.append(f"| {row.name} | {row.num_attentions} | {outcome} |")
    return "\n".join(lines) + "\n"
