# SPDX-License-Identifier: Apache-2.0
"""Sabotages the code, one place at a time, and asks the tests: `python -m tests.mutants`.

Each mutant drops a guard, swaps two groups or is off by one, in a copy of the tree; the tests named
beside it must then fail. They pass on the code as it is: that is tried first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.mutant_table import MUTANTS, Mutant
from tests.support.page_mutants import PAGES
from tests.support.share_mutants import SHARES

ALL = (*MUTANTS, *SHARES, *PAGES)
ROOT = Path(__file__).resolve().parent.parent
TESTS_FAILED = 1
"""What pytest exits with; anything else means that it could not even try."""


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    is_killed: bool
    seconds: float
    last_line: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "only", nargs="*", help="words of the mutants to try; all if none are given"
    )
    words = parser.parse_args(argv).only
    chosen = [item for item in ALL if all(word in str(item) for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        _copy_tree(tree)
        tests = sorted({test for item in chosen for test in item.tests})
        print(f"{len(chosen)} mutants; their tests on the code as it is ...", flush=True)
        code, last_line = _run_tests(tree, tests)
        print(f"    {last_line}", flush=True)
        if code != 0:
            return 1
        verdicts = [_try(item, tree, number) for number, item in enumerate(chosen, 1)]
    survived = [item.mutant for item in verdicts if not item.is_killed]
    print(f"{len(verdicts) - len(survived)} of {len(verdicts)} mutants killed")
    return 1 if survived else 0


def _copy_tree(tree: Path) -> None:
    ignored = shutil.ignore_patterns(
        ".venv", ".git", "build", "*_cache", "__pycache__", ".hypothesis"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)


def _try(mutant: Mutant, tree: Path, number: int) -> Verdict:
    path = tree / mutant.path
    code_as_it_is = path.read_text()
    if code_as_it_is.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant}: the text to replace occurs {code_as_it_is.count(mutant.old)} times"
        )
    begin = time.monotonic()
    path.write_text(code_as_it_is.replace(mutant.old, mutant.new))
    try:
        code, last_line = _run_tests(tree, mutant.tests)
    finally:
        path.write_text(code_as_it_is)
    verdict = Verdict(mutant, code == TESTS_FAILED, time.monotonic() - begin, last_line)
    word = "killed  " if verdict.is_killed else "SURVIVED"
    print(
        f"{number:3} {word} {verdict.seconds:4.0f} s  {mutant}\n             {last_line}",
        flush=True,
    )
    return verdict


def _run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Pytest's exit code and last line."""
    options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    options += ["--hypothesis-profile", "unshrunk"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    ended = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = ended.stdout.strip().splitlines()
    return ended.returncode, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
