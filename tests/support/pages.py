# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(file.relative_to(ROOT)) for file in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Code:
    """Describes a block of code: its first line, its language, and why it is not run, if so."""

    line: int
    language: str
    text: str
    not_run: str = ""


def code_of(page: str) -> list[Code]:
    """Returns the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Code(
            line=text.count("\n", 0, block.start("code")) + 1,
            language=block["language"],
            text=block["code"],
            not_run=block["why"] or "",
        )
        for block in _BLOCK.finditer(text)
    ]


def runnable(page: str, *languages: str) -> list[Code]:
    """Returns the blocks in one of these languages that are not marked as not run."""
    return [code for code in code_of(page) if code.language in languages and not code.not_run]


def inline_code(page: str) -> Iterator[str]:
    """Yields what stands between single backticks, in one line."""
    text = _BLOCK.sub("", (ROOT / page).read_text())
    for code in re.findall(r"`([^`]+)`", text):
        yield " ".join(code.split())
