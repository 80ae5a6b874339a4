"""Makes the table of a page that lists every attention with exchanges, the declined ones too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocodiff_compile.report.page.sections import Cell, Column, Table
from cocodiff_compile.report.tables import format_bytes
from cocodiff_compile.topology.phases import format_phases

_COLUMNS = (
    Column("site", True),
    Column("module", is_code=True),
    Column("status"),
    Column("tokens x heads x size", hint="heads and tokens of all ranks together"),
    Column("ranks", True),
    *(Column(role, True, f"bytes that a rank sends of {role}") for role in ("Q", "K", "V", "O")),
    Column("phases"),
    Column("chunks", True, "exchanges of Q, one for each chunk of heads or tokens"),
    Column("exposed before ms", True, "as captured"),
    Column("exposed ms", True, "as it runs now"),
    Column("hidden ms", True),
    Column("behind", hint="the longest computations while its exchanges are on the links"),
    Column("declined, and why"),
)


def sites_table(page: Mapping[str, Any]) -> Table | None:
    """Returns the table; None of a graph without any attention that exchanges."""
    summary = page["summary"]
    before, after = _times(page["captured"]), _times(page["final"])
    rows = [
        _site_row(page, site, place, before.get(place), after.get(place))
        for place, site in enumerate(summary["sites"])
    ]
    known = {site["module"] for site in summary["sites"] if site["module"]}
    rows += [_declined_row(item) for item in summary["declined"] if item["module"] not in known]
    if not rows:
        return None
    return Table(_COLUMNS, rows, "attentions that exchange tokens and heads")


def _times(order: Mapping[str, Any] | None) -> dict[int, tuple[float, float, list[str]]]:
    """Returns for each attention: milliseconds exposed and hidden, and what its exchanges hide
    behind.
    """
    found: dict[int, tuple[float, float, list[str]]] = {}
    for item in order["exchanges"] if order else ():
        assert order is not None
        names, sites = order["tasks"]["name"], order["tasks"]["site"]
        exposed, hidden, behind = found.get(sites[item["task"]], (0.0, 0.0, []))
        total = item["end_ns"] - item["begin_ns"]
        found[sites[item["task"]]] = (
            exposed + item["exposed_ns"] / 1e6,
            hidden + max(0, total - item["exposed_ns"]) / 1e6,
            [*behind, *(names[place] for place in item["behind"])],
        )
    return found


def _site_row(
    page: Mapping[str, Any],
    site: Mapping[str, Any],
    place: int,
    before: tuple[float, float, list[str]] | None,
    after: tuple[float, float, list[str]] | None,
) -> list[object]:
    legs = site["legs"]
    query, ranks = legs[0], len(legs[0]["ranks"])
    tokens = query["tokens_per_rank"]
    total = tokens * ranks if isinstance(tokens, int) else f"{ranks}*{tokens}"
    own = [
        item["reason"]
        for item in page["summary"]["declined"]
        if site["module"] and item["module"] == site["module"]
    ]
    behind = list(dict.fromkeys(after[2])) if after else []
    return [
        Cell(str(place), place),
        site["module"] or "?",
        Cell("optimised", tone="good"),
        f"{total} x {query['num_heads']} x {query['head_size']}",
        Cell(str(ranks), ranks),
        *_leg_cells(legs),
        format_phases(query["phases"]) if query["phases"] else "flat",
        Cell(str(query["chunks"]), query["chunks"]),
        _ms(before[0] if before else None),
        _ms(after[0] if after else None, is_warning=True),
        _ms(after[1] if after else None),
        Cell(", ".join(behind[:3]) or "nothing", hint=", ".join(behind[:12])),
        "; ".join(dict.fromkeys(own)),
    ]


def _leg_cells(legs: list[Mapping[str, Any]]) -> list[Cell]:
    """Returns the bytes of each leg; of one that shares an exchange, whose."""
    owner: dict[str, str] = {}
    cells = []
    for leg in legs:
        shared = owner.setdefault(leg["exchange"], leg["role"].upper())
        size = leg["bytes"]
        sort = float(size) if isinstance(size, int) else None
        text = format_bytes(size) if shared == leg["role"].upper() else f"with {shared}"
        cells.append(Cell(text, sort, hint=f"{leg['exchange']} over group {leg['group']}"))
    return cells


def _ms(value: float | None, is_warning: bool = False) -> Cell:
    if value is None:
        return Cell("")
    return Cell(f"{value:.2f}", value, "warn" if is_warning and value >= 0.005 else "")


def _declined_row(item: Mapping[str, Any]) -> list[object]:
    row: list[object] = [""] * len(_COLUMNS)
    row[1], row[2], row[-1] = item["module"] or item["node"], Cell("declined", tone="bad"), item["reason"]
    return row
