# SPDX-License-Identifier: Apache-2.0
"""Packages lie in layers: the check of `make lint` holds, sees a planted import, and is drawn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.package_graph import package_graph

ROOT = Path(__file__).parents[2]


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_planted_import_breaks_the_layers(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "cocodiff_compile", tmp_path / "cocodiff_compile")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = _lint_imports(tmp_path)
    assert done.returncode == 0, done.stdout
    with (tmp_path / "cocodiff_compile/ir/layout.py").open("a") as file:
        file.write("\nfrom cocodiff_compile.compiler import stages  # noqa\n")
    done = _lint_imports(tmp_path)
    assert done.returncode == 1
    assert "cocodiff_compile.ir is not allowed to import cocodiff_compile.compiler" in done.stdout


def test_the_documentation_shows_the_packages_as_they_are() -> None:
    assert package_graph() in (ROOT / "docs/architecture.md").read_text()
