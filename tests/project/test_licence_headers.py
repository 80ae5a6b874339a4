# SPDX-License-Identifier: Apache-2.0
"""Every source file begins with the identifier of the licence."""

from __future__ import annotations

import pytest

from tests.licence_headers import HEADERS, ROOT, sources, with_header, without_header

HEADER = HEADERS[".py"]


def test_every_source_file_names_the_licence() -> None:
    lacking = [str(path.relative_to(ROOT)) for path in without_header(ROOT)]
    assert not lacking, "python -m tests.licence_headers --fix puts the line into these"


def test_all_folders_are_looked_into_and_none_twice() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in sources(ROOT)]
    assert len(names) == len(set(names))
    assert {"passes/__init__.py", "examples/image.py", "cocodiff_compile/cli.py"} <= set(names)
    assert not any(name.startswith("cocodiff_compile/passes/") for name in names)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = 1\n", f"{HEADER}\nx = 1\n"),
        ("", f"{HEADER}\n"),
        (f"{HEADER}\nx = 1\n", f"{HEADER}\nx = 1\n"),
        ("#!/usr/bin/env python3\nx = 1\n", f"#!/usr/bin/env python3\n{HEADER}\nx = 1\n"),
        (f"#!/bin/sh\n{HEADER}\n", f"#!/bin/sh\n{HEADER}\n"),
        (f'"""Text."""\n{HEADER}\n', f'{HEADER}\n"""Text."""\n{HEADER}\n'),
    ],
)
def test_the_header_is_put_once_and_below_an_interpreter(text: str, wanted: str) -> None:
    assert with_header(text, HEADER) == wanted
