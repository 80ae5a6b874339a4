# SPDX-License-Identifier: Apache-2.0
"""Tests that a wheel, an sdist and a checkout install our name and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

from tests.release_check import Failed, wheel_is_whole

ROOT = Path(__file__).parents[2]


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` does: an sdist from the tree, a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    _run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_packages_are_the_folders_of_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    folders = [
        *(file.parent for file in (ROOT / "cocodiff_compile").rglob("__init__.py")),
        ROOT / "cocodiff_compile" / "passes",
        ROOT / "cocodiff_compile" / "backends",
    ]
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert sorted(listed) == sorted(found)


def test_a_wheel_holds_all_files_of_the_packages_and_nothing_else(wheel: Path) -> None:
    assert wheel_is_whole(wheel, ROOT)
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        names = set(archive.namelist())
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cocodiff_compile"}
    assert "cocodiff_compile/py.typed" in names
    assets = {"page.html", "page.css", "page.js", "tables.js", "chart.js", "timeline.js", "diff.js"}
    assert {f"cocodiff_compile/report/page/{name}" for name in assets} <= names


def test_a_file_that_a_wheel_lacks_is_named(wheel: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "cocodiff_compile", tree / "cocodiff_compile", symlinks=True)
    (tree / "cocodiff_compile" / "page.html").touch()
    with pytest.raises(Failed, match=r"missing: \['cocodiff_compile/page.html'\]"):
        wheel_is_whole(wheel, tree)


@pytest.mark.parametrize(
    ("statement", "works"),
    [
        ("import cocodiff_compile.passes", True),
        ("from cocodiff_compile.passes.recognize_ulysses import RecognizeUlysses", True),
        ("import passes", False),
        ("import backends", False),
    ],
)
def test_what_can_be_imported_from_a_wheel(installed: Path, statement: str, works: bool) -> None:
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); {statement}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == works, done.stderr


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_a_second_identity_from_the_checkout_is_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"from cocodiff_compile import {name}" in done.stderr


def test_the_console_script_names_its_version() -> None:
    script = Path(sys.executable).with_name("cocodiff")
    assert "cocodiff 0." in _run(str(script), "--version", cwd=ROOT)


def test_importing_does_not_import_diffusers() -> None:
    code = "import sys, cocodiff_compile; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
