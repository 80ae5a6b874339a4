# SPDX-License-Identifier: Apache-2.0
"""The version stands in one place, and what else names one agrees."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import tomllib
import yaml

from cocodiff_compile import __version__

ROOT = Path(__file__).parents[2]


def test_the_version_is_taken_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "cocodiff_compile.__version__"


def test_what_is_installed_has_this_version() -> None:
    assert metadata.version("cocodiff-compile") == __version__


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_changelog_ends_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [name for name in headings if name != "Unreleased"]
    assert releases[0] == __version__
    assert headings == ["Unreleased", *releases]


def test_licences_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert "Apache License\n" in (ROOT / "LICENSE").read_text()
