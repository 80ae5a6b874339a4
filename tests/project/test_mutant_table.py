# SPDX-License-Identifier: Apache-2.0
"""Every sabotage that `make mutants` tries has its place in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import ALL
from tests.support.mutant_table import Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", ALL, ids=str)
def test_what_is_sabotaged_stands_once_in_its_file(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
    files = {test.partition("::")[0] for test in mutant.tests}
    assert all((ROOT / file).exists() for file in files)
