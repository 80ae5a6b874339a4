# SPDX-License-Identifier: Apache-2.0
"""Formats rows as tables of text, and bytes as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns columns of text, each as wide as its widest cell."""
    cells = [list(map(str, headers)), *(list(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def format_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns a table with a column per key, empty cells for keys that a row lacks; of no rows,
    nothing.
    """
    if not rows:
        return ""
    headers = list(dict.fromkeys(header for row in rows for header in row))
    return format_table(headers, [[row.get(header, "") for header in headers] for row in rows])


def format_bytes(size: int | str) -> str:
    """Returns 1536 as '1.5 KiB'; a formula stays a formula."""
    if isinstance(size, str):
        return f"{size} B"
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Returns 0.0123 as '12.3 ms', 0.00001 as '10.0 us'."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
