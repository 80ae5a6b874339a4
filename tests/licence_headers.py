# SPDX-License-Identifier: Apache-2.0
"""Says which source files lack the line that names the licence: `python -m tests.licence_headers`.

With `--fix` the line is put at the head of each of them, below a line that names an interpreter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cocodiff_compile", "passes", "backends", "tests", "examples", "benchmarks", "docs")
IDENTIFIER = "SPDX-License-Identifier: Apache-2.0"
HEADERS = {".py": f"# {IDENTIFIER}", ".js": f"// {IDENTIFIER}", ".css": f"/* {IDENTIFIER} */"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="put the line where it is missing")
    given = parser.parse_args(argv)
    lacking = list(without_header(ROOT))
    for path in lacking:
        print(path.relative_to(ROOT))
        if given.fix:
            path.write_text(with_header(path.read_text(), HEADERS[path.suffix]))
    print(f"{len(lacking)} files {'had' if given.fix else 'have'} no header")
    return int(bool(lacking) and not given.fix)


def sources(root: Path) -> Iterator[Path]:
    """Yields every source file of the tree once; links to folders are not followed."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in HEADERS and path.is_file():
                yield path


def without_header(root: Path) -> Iterator[Path]:
    for path in sources(root):
        text = path.read_text()
        if with_header(text, HEADERS[path.suffix]) != text:
            yield path


def with_header(text: str, header: str) -> str:
    """Returns the text with the header where it belongs, unchanged if it is there."""
    first, separator, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    if rest.splitlines()[:1] == [header]:
        return text
    return f"{first}{separator}{header}\n{rest}"


if __name__ == "__main__":
    sys.exit(main())
