# SPDX-License-Identifier: Apache-2.0
"""The code of the pages runs: Python as it stands there, and commands are commands that exist.

What needs weights gets a tiny pipeline with random ones; nothing else is replaced.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from torch.distributed.run import get_args_parser

from cocodiff_compile import cli
from tests.support.pages import PAGES, ROOT, code_of, inline_code, runnable

IN_ONE_PROCESS = {
    "docs/quick_start.md": "",
    "docs/howto/add_an_op.md": "",
    "docs/howto/write_a_pass.md": "",
    "docs/read_a_report.md": "model",
}
ON_TWO_RANKS = {
    "README.md": "pipeline",
    "docs/howto/serve.md": "pipeline",
    "docs/usage.md": "pieces",
    "docs/v_major.md": "pieces",
}
"""Each page with what `tests.support.run_page` is to give it."""


def _run(folder: Path, *command: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("page", IN_ONE_PROCESS)
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    said = _run(tmp_path, "tests.support.run_page", page, IN_ONE_PROCESS[page])
    assert said.count(f"{page}:") == len(runnable(page, "python")) > 0


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ON_TWO_RANKS)
def test_a_page_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="text encoders: pip install '.[adapters]'")
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = _run(tmp_path, *start, "-m", "tests.support.run_page", page, ON_TWO_RANKS[page])
    assert said.count(f"{page}:") == 2 * len(runnable(page, "python")) > 0


def test_every_page_with_code_is_run() -> None:
    with_code = {page for page in PAGES if runnable(page, "python")}
    assert with_code == {*IN_ONE_PROCESS, *ON_TWO_RANKS}


def test_little_is_not_run() -> None:
    not_run = [code for page in PAGES for code in code_of(page) if code.not_run]
    assert len(not_run) <= 2
    assert all(code.language == "python" for code in not_run)


def commands(page: str) -> list[str]:
    """Returns the commands of a page: lines of its shell blocks, and code in its sentences."""
    blocks = "\n".join(code.text for code in runnable(page, "sh", "bash")).replace("\\\n", " ")
    lines = [part for line in blocks.splitlines() for part in line.split("&&")]
    named = [part for code in inline_code(page) for part in code.split("&&")]
    said = re.compile(r"\s*(make|cocodiff|python -m|torchrun) +[\w-]")
    return [line.strip() for line in (*lines, *filter(said.match, named)) if line.strip()]


PLACEHOLDER = re.compile(r"\.\.\.|\[--|\b[A-Z]{2,}\b(?!=)|[|…]")
"""Marks a form of a command that is not to be typed as it stands."""


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_exist(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        words = shlex.split(command, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            _check(words, command)


def _check(words: list[str], command: str) -> None:
    name, *rest = words
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets, command
    elif name == "cocodiff":
        if not PLACEHOLDER.search(command):
            _parses(cli._parser(), rest, command)
    elif name == "torchrun":
        asked = get_args_parser().parse_args(rest)
        if asked.training_script == "cocodiff":
            _check(["cocodiff", *asked.training_script_args], command)
    elif name.startswith("python"):
        assert _is_there(rest), command
    elif name == "pip":
        assert all(extra in _extras() for extra in re.findall(r"\.\[(.*?)\]", command)), command
    else:
        assert name in ("source", "qsub", "mpiexec", "tlparse"), command


def _parses(parser: argparse.ArgumentParser, words: list[str], command: str) -> None:
    try:
        parser.parse_args(words)
    except SystemExit as exit_:
        assert exit_.code == 0, command


def _is_there(words: list[str]) -> bool:
    if words[0] == "-m":
        return (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file() or (
            importlib.util.find_spec(words[1].partition(".")[0]) is not None
        )
    return (ROOT / words[0]).is_file()


def _extras() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = list(project["optional-dependencies"])
    return [*names, *(f"{one},{other}" for one in names for other in names)]
