# SPDX-License-Identifier: Apache-2.0
"""Shows the contract of a pass, the head of its file, as a list of terms, and drawings as code."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Extension, Module

TERM = re.compile(r"^(Needs|Rewrites|Keeps|Declines) +(\S.*(?:\n {10}.*)*)\n", re.MULTILINE)
DRAWING = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")


class Contracts(Extension):
    """Turns the aligned columns of a docstring into Markdown."""

    def on_module(self, *, mod: Module, **_others: Any) -> None:
        """Rewrites the docstring of one module."""
        if mod.docstring is not None:
            mod.docstring.value = as_markdown(mod.docstring.value)


def as_markdown(text: str) -> str:
    """Returns `text` with its contract as a definition list, and what is indented as code."""

    def definition(term: re.Match[str]) -> str:
        body = dedent(" " * 10 + term[2]).replace("\n", "\n    ")
        return f"{term[1]}\n:   {body}\n\n"

    drawn = DRAWING.sub(lambda part: f"```text\n{dedent(part[0])}```\n", f"{text}\n")
    return TERM.sub(definition, drawn)
