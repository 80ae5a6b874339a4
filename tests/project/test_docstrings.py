# SPDX-License-Identifier: Apache-2.0
"""Docstrings are sentences: none begins as a fragment such as "Of ..." or "Those ..."."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("cocodiff_compile", "passes", "backends", "tests", "examples", "benchmarks", "docs")

SENTENCE_FRAGMENTS = (
    *("Of", "That", "This", "These", "Those", "Which", "Whose", "Who", "What"),
    *("As", "By", "For", "From", "In", "Into", "On", "To", "With", "Without", "Until", "Towards"),
    *("After", "Before", "Behind", "Below", "Beside", "Between", "Beyond"),
    *("And", "But", "Else", "Or", "So", "Likewise", "Also"),
    *("Where", "Why"),
)
"""First words that begin a fragment in the docstring of a module, a class or a function."""

FIELD_FRAGMENTS = tuple(
    word for word in SENTENCE_FRAGMENTS if word not in ("What", "Where", "Why", "Which", "Whose")
)
"""The same for fields and constants, which noun phrases and indirect questions may describe."""

DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Expr, bool]]:
    """Yields every string statement, and whether it documents a field or a constant."""
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for number, statement in enumerate(block if isinstance(block, list) else ()):
                if _is_text(statement):
                    is_first = number == 0 and isinstance(node, DEFINITIONS)
                    yield statement, not is_first


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def fragments(source: str) -> list[tuple[int, str]]:
    """Returns (line, first line of text) of every docstring that begins as a fragment."""
    found = []
    for statement, is_field in docstrings(ast.parse(source)):
        assert isinstance(statement.value, ast.Constant)
        text = str(statement.value.value).strip()
        words = FIELD_FRAGMENTS if is_field else SENTENCE_FRAGMENTS
        # "Whether" alone is no sentence either; a field may be described by it.
        words = words if is_field else (*words, "Whether", "How")
        if text.split(maxsplit=1)[0].rstrip(",:;.") in words:
            found.append((statement.lineno, text.splitlines()[0]))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_as_sentences(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files
        for line, text in fragments(file.read_text())
    ]
    assert not wrong, "docstrings that begin as a fragment:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Of all ranks."""', 1),
        ('"""Returns the bytes of all ranks."""', 0),
        ('def f():\n    """What was sent."""', 1),
        ('def f():\n    """Whether it is sent."""', 1),
        ('class C:\n    """Holds x."""\n    x: int = 0\n    """Whether it is sent."""', 0),
        ('class C:\n    x: int = 0\n    """Of the last call."""', 1),
        ('if x:\n    def f():\n        """By rank."""', 1),
        ('class C:\n    def f(self):\n        self.x = 0\n        """Those that wait."""', 1),
    ],
)
def test_fragments_are_found_wherever_they_are(source: str, count: int) -> None:
    assert len(fragments(source)) == count
