# SPDX-License-Identifier: Apache-2.0
"""Writes those parts of pages that the code knows best.

A comment `<!-- generated: NAME -->` stands in the page for each.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from cocodiff_compile.cli import _parser
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.errors import UserError

MARK = re.compile(r"<!-- generated: ([\w ]+) -->")


def on_page_markdown(markdown: str, **_others: Any) -> str:
    """Puts what is generated in the place of its comment."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


def command_line() -> str:
    """Returns the help of every command, as `--help` prints it."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "96"
    try:
        return "\n".join(
            f"## {parser.prog}\n```text\n{parser.format_help().rstrip()}\n```\n"
            for parser in parsers(_parser())
        )
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def allowed_values() -> str:
    """Returns a table of the options, their defaults, and what their refusals say is allowed."""
    rows = [
        f"| [`{field.name}`](#cocodiff_compile.config.CompileConfig.{field.name}) "
        f"| `{field.default!r}` | {_allowed(field.name)} |"
        for field in fields(CompileConfig)
    ]
    return "\n".join(["| option | default | allowed |", "|---|---|---|", *rows])


def _allowed(name: str) -> str:
    """Returns what the option says is allowed when it is given something else."""
    try:
        CompileConfig.from_options({name: 0.5})
    except UserError as refusal:
        return re.sub(r"'([^']*)'", r'`"\1"`', str(refusal).partition("; allowed: ")[2])
    raise AssertionError(f"option {name!r} takes anything")


PARTS = {"command line": command_line, "allowed values": allowed_values}
