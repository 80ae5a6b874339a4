# SPDX-License-Identifier: Apache-2.0
"""Makes the site of the pages of docs/ and of files at the top of the repository.

Pages link to each other as files of the repository do. Here the files at the top become pages,
other files that pages link to are copied, and links are rewritten to where their file stands in the
site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
TOP_PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""The pages that are made of files outside of docs/."""

LINK = re.compile(r"(\]\()([^)#\s]+)")
"""The target of a link or a picture, without its anchor."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the files at the top, and the files outside of docs/ that pages link to."""
    for name, page in TOP_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for file in list(files.documentation_pages()):
        for target in _targets(file.content_string, file.src_uri):
            if _is_copied(target) and target not in files.src_uris:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Rewrites the links of a page outside of its code."""
    here = page.file.src_uri
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_rewritten(markdown[end : fence.start()], here), fence.group()]
        end = fence.end()
    return "".join([*parts, _rewritten(markdown[end:], here)])


def _rewritten(text: str, here: str) -> str:
    def to_site(link: re.Match[str]) -> str:
        place = _site_place(_repository_place(link[2], here))
        return link[0] if place is None else link[1] + _relative(place, here)

    return LINK.sub(to_site, text)


def _targets(markdown: str, here: str) -> list[str]:
    return [_repository_place(link[2], here) for link in LINK.finditer(FENCE.sub("", markdown))]


def _repository_place(target: str, here: str) -> str:
    """Returns the path in the repository of what the page `here` of the site calls `target`."""
    pages = {page: name for name, page in TOP_PAGES.items()}
    own = pages.get(here, f"docs/{here}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), target))


def _site_place(path: str) -> str | None:
    """Returns where the site holds the file `path` of the repository; None if there is none."""
    if path in TOP_PAGES:
        return TOP_PAGES[path]
    if not (ROOT / path).is_file():
        return None
    return path if _is_copied(path) else path.removeprefix("docs/")


def _is_copied(path: str) -> bool:
    is_page = path in TOP_PAGES or path.startswith("docs/")
    return not is_page and not path.startswith("..") and (ROOT / path).is_file()


def _relative(place: str, here: str) -> str:
    return posixpath.relpath(place, posixpath.dirname(here) or ".")
