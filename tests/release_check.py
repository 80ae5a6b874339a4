# SPDX-License-Identifier: Apache-2.0
"""Builds a wheel and an sdist, and tries each in an empty environment: what a release would be.

    python -m tests.release_check [--only wheel|sdist|files] [--keep FOLDER]

Needs the extra `release` (`make release-check` installs it) and an index that pip finds packages
on; all versions are those of constraints.txt. Prints a table of checks; the exit status is 1 if one
failed. `--keep` leaves what was built in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomllib
from packaging.metadata import Metadata

from cocodiff_compile import __version__
from cocodiff_compile.report.tables import format_table

ROOT = Path(__file__).resolve().parents[1]
NOT_PART = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)
IN_THE_WHEEL = ("cocodiff_compile", "passes", "backends")
IN_THE_SDIST = (*IN_THE_WHEEL, "tests", "docs", "examples", "benchmarks")
NEED_DIFFUSERS = {
    **dict.fromkeys(("check", "simulate", "coverage", "bench"), "diffusers"),
    **dict.fromkeys(("demo", "quality"), "quality"),
}
"""The commands that need diffusers, and the extra that each must name."""


class Failed(Exception):
    """Says why a check failed."""


@dataclass
class Checks:
    """Runs checks one by one and keeps what came of each."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    has_failed: bool = False

    def run(self, where: str, what: str, check: Callable[[], str]) -> None:
        """Runs `check`, which returns a remark or raises `Failed`."""
        begin = time.monotonic()
        try:
            verdict, remark = "ok", check()
        except Failed as error:
            verdict, remark = "FAILED", str(error)
            self.has_failed = True
        self.rows.append((where, what, verdict, last_line(remark)))
        print(f"{time.monotonic() - begin:5.0f} s  {verdict:6} {where}: {what}", flush=True)
        if verdict != "ok":
            print(remark, flush=True)

    def table(self) -> str:
        return format_table(("where", "check", "", "remark"), self.rows)


def last_line(text: str) -> str:
    """Returns the end of what a command said, for the table; what pip warns of is left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1].strip()[:90] if lines else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("wheel", "sdist", "files"))
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    given = parser.parse_args(argv)
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        built = build(folder)
        check_files(checks, built, folder)
        for kind, file in (("wheel", built.wheel), ("sdist", built.sdist)):
            if given.only in (None, kind):
                check_installed(checks, kind, file, built.unpacked, folder)
        if given.keep:
            shutil.copytree(built.wheel.parent, given.keep, dirs_exist_ok=True)
    print(f"\n{checks.table()}")
    return int(checks.has_failed)


@dataclass(frozen=True)
class Built:
    """Holds what was built of a clean copy of the tree; `unpacked` is the sdist, as a folder."""

    tree: Path
    wheel: Path
    sdist: Path
    unpacked: Path


def build(folder: Path) -> Built:
    """Builds as `python -m build` does, of a copy: what lies about in the tree is not released."""
    tree, dist = folder / "tree", folder / "dist"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_PART))
    pristine = folder / "pristine"
    shutil.copytree(tree, pristine, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree, cwd=folder)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    return Built(pristine, wheel, sdist, unpacked)


def run(*command: object, cwd: Path, status: int = 0, more: Mapping[str, str] | None = None) -> str:
    """Returns what a command printed. Raises `Failed` if it ends with another status."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **settings, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != status:
        raise Failed(f"{done.stdout}\n{' '.join(map(str, command))}: status {done.returncode}")
    return done.stdout


# What was built


def check_files(checks: Checks, built: Built, folder: Path) -> None:
    checks.run(
        "wheel",
        "holds the packages, and nothing else",
        lambda: wheel_is_whole(built.wheel, built.tree),
    )
    checks.run("sdist", "holds packages, tests, docs, examples", lambda: sdist_is_whole(built))
    checks.run("wheel", "metadata are complete", lambda: metadata_is_complete(built))
    checks.run("wheel", "the README renders as on an index", lambda: readme_renders(built))
    strict = (
        sys.executable,
        "-m",
        "twine",
        "--no-color",
        "check",
        "--strict",
        built.wheel,
        built.sdist,
    )
    checks.run("both", "twine check --strict", lambda: run(*strict, cwd=folder))


def wheel_is_whole(wheel: Path, tree: Path) -> str:
    """Compares a wheel with the tree that it was built of."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    found = {name for name in names if ".dist-info/" not in name}
    same(found, {_as_installed(name) for name in files(tree, IN_THE_WHEEL)})
    return f"{len(found)} files"


def _as_installed(name: str) -> str:
    return name if name.startswith("cocodiff_compile/") else f"cocodiff_compile/{name}"


def sdist_is_whole(built: Built) -> str:
    found = set(files(built.unpacked, IN_THE_SDIST))
    same(found, set(files(built.tree, IN_THE_SDIST)))
    for name in ("LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"):
        if not (built.unpacked / name).is_file():
            raise Failed(f"{name} is missing")
    return f"{len(found)} files"


def files(tree: Path, folders: Sequence[str]) -> Iterator[str]:
    """Yields the files below some folders of a tree; links to folders are not followed."""
    for folder in folders:
        for file in (tree / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file.relative_to(tree).as_posix()


def same(found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        missing, more = sorted(wanted - found), sorted(found - wanted)
        raise Failed(f"missing: {missing}; not wanted: {more}")


def read_metadata(built: Built) -> Metadata:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def metadata_is_complete(built: Built) -> str:
    metadata = read_metadata(built)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        "name": project["name"],
        "version": __version__,
        "summary": project["description"],
        "description_content_type": "text/markdown",
        "license_expression": "Apache-2.0",
        "license_files": ["LICENSE"],
        "classifiers": project["classifiers"],
        "requires_python": project["requires-python"],
        "provides_extra": list(project["optional-dependencies"]),
    }
    for key, value in wanted.items():
        if str(got := getattr(metadata, key)) != str(value):
            raise Failed(f"{key} is {got!r}, not {value!r}")
    if not (metadata.project_urls and metadata.keywords):
        raise Failed("project_urls or keywords are missing")
    return f"{metadata.name} {metadata.version}, Python {metadata.requires_python}"


def readme_renders(built: Built) -> str:
    from readme_renderer import markdown  # noqa: PLC0415  (of the extra `release`)

    page = markdown.render(read_metadata(built).description or "")
    if not page or page.count("<h2") < 3 or "<table" not in page:
        raise Failed("the README does not render as headings and tables")
    return f"{len(page)} characters of HTML"


# What was installed


def check_installed(checks: Checks, kind: str, file: Path, sdist: Path, folder: Path) -> None:
    """Tries a file in an environment of its own: first without diffusers, then with it."""
    env = folder / f"venv-{kind}"
    python, cocodiff = env / "bin" / "python", env / "bin" / "cocodiff"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")

    def install() -> str:
        run(sys.executable, "-m", "venv", env, cwd=folder)
        return run(*pip, file, cwd=folder)

    def tried(what: str, *command: object) -> None:
        checks.run(kind, what, lambda: run(*command, cwd=folder))

    checks.run(kind, "installs into an empty environment", install)
    tried("its dependencies fit", python, "-m", "pip", "check")
    checks.run(kind, "is imported from there", lambda: imported(python, env, folder))
    checks.run(kind, "cocodiff --version", lambda: named_version(cocodiff, folder))
    tried("cocodiff doctor", cocodiff, "doctor")
    tried("cocodiff topology aurora --ranks 24", cocodiff, "topology", "aurora", "--ranks", 24)
    ranks = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    own_model = sdist / "examples" / "own_model.py"
    tried("a plain model on 2 ranks", *ranks, own_model, "--tiny", "--steps", 3)
    tried("cocodiff explain of the same", cocodiff, "explain", own_model, "--tiny", "--steps", 3)
    says_so = f"{', '.join(NEED_DIFFUSERS)} say that they need diffusers"
    checks.run(kind, says_so, lambda: refused(python, folder))
    advice = "cocodiff-compile[diffusers]"
    tried(f"pip install '{advice}', as they advise", *pip, advice)
    tried("explain FLUX over 4 ranks", python, sdist / "examples" / "explain_sharing.py", "flux")
    tried("cocodiff coverage", cocodiff, "coverage", "--classes", "PriorTransformer")


def imported(python: Path, env: Path, folder: Path) -> str:
    code = "import cocodiff_compile as c; print(c.__file__); c.explain; import sys; "
    code += "sys.exit('diffusers' in sys.modules)"
    place = run(python, "-c", code, cwd=folder).strip()
    if not Path(place).is_relative_to(env):
        raise Failed(f"imported from {place}")
    return "without diffusers"


def named_version(cocodiff: Path, folder: Path) -> str:
    said = run(cocodiff, "--version", cwd=folder).strip()
    if said != f"cocodiff {__version__}":
        raise Failed(f"it says {said!r}")
    return said


def refused(python: Path, folder: Path) -> str:
    """Calls the commands one by one, in one process: torch takes seconds to import."""
    code = (
        f"from cocodiff_compile.cli import main; print(*(main([c]) for c in {[*NEED_DIFFUSERS]}))"
    )
    *said, statuses = run(python, "-c", code, cwd=folder).splitlines()
    for command, extra in NEED_DIFFUSERS.items():
        line = f"cocodiff {command}: needs diffusers: pip install 'cocodiff-compile[{extra}]'"
        if line not in said:
            raise Failed(f"{said}\nwithout the line: {line}")
    if set(statuses.split()) != {"2"}:
        raise Failed(f"they ended with {statuses}")
    return "each names the extra; status 2"


if __name__ == "__main__":
    sys.exit(main())
