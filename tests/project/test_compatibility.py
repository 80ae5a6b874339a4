# SPDX-License-Identifier: Apache-2.0
"""The page that says what works names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_names_tests_that_exist_or_says_untested() -> None:
    rows = [line.split("|")[1:-1] for line in _page().splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for feature, verdict, test in rows:
        if feature.strip():
            files = re.findall(r"tests/[\w/]+\.py", test)
            assert files or "untested" in verdict or "make" in test or "source" in test, feature
            assert all((ROOT / file).is_file() for file in files), feature


def _page() -> str:
    return (ROOT / "docs/compatibility.md").read_text()
