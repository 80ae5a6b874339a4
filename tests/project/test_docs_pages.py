# SPDX-License-Identifier: Apache-2.0
"""Links of the pages lead to files, drawings are those that the code makes, messages are real."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

import cocodiff_compile
from cocodiff_compile.passes import PASS_NAMES
from docs.drawings.all import DRAWINGS, FOLDER
from tests.support.pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SOURCES = ("cocodiff_compile", "passes", "backends")
HOLE = "\0"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    local = [target for target in LINK.findall(text) if "://" not in target]
    missing = [target for target in local if not ((ROOT / page).parent / target).is_file()]
    assert not missing


def test_every_drawing_is_what_its_code_makes() -> None:
    assert {file.stem for file in FOLDER.glob("*.svg")} == set(DRAWINGS)
    for name, draw in DRAWINGS.items():
        assert (FOLDER / f"{name}.svg").read_text() == draw(), "run python -m docs.drawings"
        ElementTree.fromstring(draw())


def test_a_picture_that_a_page_shows_is_drawn_once_per_concept() -> None:
    for name in DRAWINGS:
        assert f"]({name}.svg)" in (FOLDER / f"{name}.md").read_text()


def test_the_reference_holds_every_public_name_and_every_pass() -> None:
    shown = [*_entries("python"), *_entries("options")]
    names = [name.rpartition(".")[2] for name in shown]
    assert set(cocodiff_compile.__all__) - set(names) == set()
    modules = [name.rpartition(".")[2] for name in _entries("passes")]
    assert modules == [name.replace("-", "_") for name in PASS_NAMES]


def _entries(page: str) -> list[str]:
    text = (ROOT / f"docs/reference/{page}.md").read_text()
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def messages() -> list[str]:
    """Returns the messages that the FAQ explains."""
    return re.findall(r"^### `(.+)`$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_messages_of_the_faq_are_in_the_code(message: str) -> None:
    parts = [part.strip(" :;,") for part in message.split("...")]
    wanted = [part for part in parts if re.search(r"\w{2}", part)]
    assert wanted
    for part in wanted:
        assert any(part in text for text in _texts()), part


@functools.cache
def _texts() -> list[str]:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    return [text for file in files for text in _strings(file)]


def _strings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
