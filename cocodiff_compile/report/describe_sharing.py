# SPDX-License-Identifier: Apache-2.0
"""Formats what is shared out over ranks, and what is whole and why, as text.

What is alike in blocks one behind the other becomes one row, so that a model of many blocks is as
short as one of few.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cocodiff_compile.decide.shard_report import (
    AttentionShare,
    Gather,
    LeftWhole,
    ModuleShare,
    ShardReport,
    Slice,
)
from cocodiff_compile.report.tables import format_bytes, format_rows, format_seconds

MAX_ROWS = 10
"""How many rows a table of what was gathered, sliced or left whole has."""
MODULE_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""The number of a block in the name of a module."""
_NAME_NUMBER = re.compile(r"_\d+$")
Row = TypeVar("Row", bound=Any)


def format_sharing(report: ShardReport) -> str:
    """Returns what `explain` prints: totals, attentions, gathers, slices, what is left whole."""
    tables = (
        _head(report),
        _table("attentions", folded(report.attentions), _attention_row),
        _table("shares that are gathered", folded(report.gathers), _gather_row),
        _table(
            "wholes of which each rank takes its share", _by_size(folded(report.slices)), _slice_row
        ),
        _table(
            "left whole where tokens were followed to",
            [(item, 1, "") for item in report.left_whole],
            _whole_row,
        ),
    )
    return "\n".join(table for table in tables if table)


def format_modules(report: ShardReport) -> str:
    """Returns a table of the modules of the model in the order of the program."""
    return format_rows([_module_row(*row) for row in folded(report.modules)])


def _head(report: ShardReport) -> str:
    what = "shared out" if report.is_applied else "not shared out; it would be"
    whole, without = report.whole_part, report.num_without_tokens
    handed = (
        f"\nhanded from block to block as shares: {_count(report.num_taken, 'input')}, "
        f"{_count(report.num_kept, 'output')}"
    )
    return (
        f"{what}, over {report.num_ranks} ranks: "
        f"{report.num_shared} of {report.num_shared + report.num_whole} ops, "
        f"{percent(1 - whole)} of the estimated time of one rank\n"
        f"whole on every rank: {_count(report.num_whole, 'op')}, {percent(whole)} of the time; "
        f"no tokens were followed to {without} of them\n"
        f"estimated step: {format_seconds(report.one_rank_s)} on one rank, "
        f"{format_seconds(report.step_s)} shared out ({report.gain:.2f}x)"
        f"{handed if report.num_taken + report.num_kept else ''}"
    )


def percent(part: float) -> str:
    """Returns 0.8934 as '89.3 %'; only what is all or nothing is 100 or 0 %."""
    shown = min(max(part, 0.001), 0.999) if 0 < part < 1 else part
    return f"{shown * 100:.1f} %" if shown not in (0, 1) else f"{shown * 100:.0f} %"


def attention_modes(module: ModuleShare) -> str:
    """Returns how the attentions of a module are computed: '1 Ulysses, 1 cross'."""
    return ", ".join(f"{count} {mode}" for mode, count in Counter(module.attentions).items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(title: str, rows: Sequence[tuple[Any, int, str]], row_of: Any) -> str:
    if not rows:
        return ""
    shown = rows if title == "attentions" else rows[:MAX_ROWS]
    lines = [f"{title}:", format_rows([row_of(*row) for row in shown])]
    if len(rows) > len(shown):
        lines.append(f"... and {len(rows) - len(shown)} more rows")
    return "\n".join(lines)


def folded(rows: Iterable[Row]) -> list[tuple[Row, int, str]]:
    """Returns rows that are alike but for numbers in their names once, in the order of the first
    of them: with their count, and with a module that names all: `blocks.0-18.attn`.
    """
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(_without_numbers(row), []).append(row)
    return [
        (alike[0], len(alike), joined_name([item.module for item in alike]))
        for alike in found.values()
    ]


def _without_numbers(row: Any) -> Any:
    names = {"module": MODULE_NUMBER.sub("*", row.module)}
    if hasattr(row, "node"):
        names["node"] = _NAME_NUMBER.sub("", row.node)
    if hasattr(row, "reader"):
        names["reader"] = _NAME_NUMBER.sub("", row.reader)
        names["reader_module"] = MODULE_NUMBER.sub("*", row.reader_module)
    if isinstance(row, Slice):
        names["node"] = "" if row.module else row.node
    return replace(row, **names)


def joined_name(names: Sequence[str]) -> str:
    """Returns one name for modules that differ in their numbers, each a range if it has no gaps."""
    numbers = [MODULE_NUMBER.findall(name) for name in names]
    columns = iter([_range(list(map(int, column))) for column in zip(*numbers, strict=True)])
    return MODULE_NUMBER.sub(lambda _match: next(columns), names[0])


def _range(numbers: Sequence[int]) -> str:
    found = sorted(set(numbers))
    if len(found) == 1:
        return str(found[0])
    has_no_gaps = found == list(range(found[0], found[-1] + 1))
    return f"{found[0]}-{found[-1]}" if has_no_gaps else f"{found[0]}..{found[-1]}"


def _by_size(rows: list[tuple[Slice, int, str]]) -> list[tuple[Slice, int, str]]:
    return sorted(rows, key=lambda row: -row[0].share_bytes * row[1])


def _attention_row(item: AttentionShare, count: int, module: str) -> dict[str, object]:
    return {
        "module": module or item.node,
        "count": count,
        "mode": item.mode,
        "heads": _padded((item.heads,), (item.padded_heads,), item),
        "tokens": _padded(item.tokens, item.padded_tokens, item),
        "keys": item.keys,
        "exchanges": format_seconds(item.exchange_s) if item.mode == "Ulysses" else "",
        "why whole": _why_whole(item),
    }


def _why_whole(item: AttentionShare) -> str:
    if item.mode != "whole" or not item.could_be:
        return item.why_whole
    saved, exchanged = format_seconds(item.saved_s), format_seconds(item.exchange_s)
    return f"{item.why_whole}: {item.could_be} saves {saved}, its exchanges take {exchanged}"


def _padded(real: Sequence[int], padded: Sequence[int], item: AttentionShare) -> str:
    text = "+".join(map(str, real))
    if real == padded or item.mode == "whole":
        return text
    return f"{text} (padded to {'+'.join(map(str, padded))})"


def _gather_row(item: Gather, count: int, module: str) -> dict[str, object]:
    reader = f"{item.reader_module}: {item.reader}" if item.reader_module else item.reader
    more = f" and {item.num_readers - 1} more" if item.num_readers > 1 else ""
    return {
        "node": f"{module}: {item.node}" if module else item.node,
        "shape": _shape(item.shape),
        "count": count,
        "bytes": format_bytes(item.size_bytes),
        "estimated": format_seconds(item.seconds),
        "read by": f"{reader}{more}",
        "why": item.why,
    }


def _slice_row(item: Slice, count: int, module: str) -> dict[str, object]:
    return {
        "node": f"{module}: {item.node}" if module else item.node,
        "shape": _shape(item.shape),
        "count": count,
        "bytes of a share": format_bytes(item.share_bytes),
        "estimated": format_seconds(item.seconds),
        "readers": item.num_readers,
    }


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "a number"


def _whole_row(item: LeftWhole, _count: int, _module: str) -> dict[str, object]:
    return {
        "op": item.op,
        "count": item.count,
        "estimated": format_seconds(item.seconds),
        "why": item.why,
        "first in": item.module,
    }


def _module_row(item: ModuleShare, count: int, module: str) -> dict[str, object]:
    return {
        "module": module,
        "count": count,
        "shared out": percent(item.shared_part),
        "ops shared": item.num_shared,
        "ops whole": item.num_whole,
        "estimated on one rank": format_seconds(item.shared_s + item.whole_s),
        "attentions": attention_modes(item),
        "gathers": item.num_gathers or "",
        "gathered": format_bytes(item.gathered_bytes) if item.num_gathers else "",
    }
