# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of a page that list every attention with exchanges, the declined ones too, and
every exchange that stays exposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocodiff_compile.report.exposed import carried_by, module_of_exchange
from cocodiff_compile.report.page.sections import Cell, Column, Table
from cocodiff_compile.report.tables import format_bytes
from cocodiff_compile.topology.phases import format_phases

_COLUMNS = (
    Column("site", True),
    Column("module", is_code=True),
    Column("status"),
    Column("declined, and why", is_wide=True),
    Column("before", True, "milliseconds exposed as captured"),
    Column("exposed ms", True, "as it runs now"),
    Column("hidden ms", True),
    Column("tokens x heads x size", hint="heads and tokens of all ranks together"),
    *(Column(role, True, f"bytes that a rank sends of {role}") for role in ("Q", "K", "V", "O")),
    Column("phases"),
    Column("chunks", True, "exchanges of Q, one for each chunk of heads or tokens"),
    Column("ranks", True),
    Column(
        "behind", hint="the longest computations while its exchanges are on the links", is_wide=True
    ),
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
    declined: dict[tuple[str, str], list[str]] = {}
    for item in summary["declined"]:
        if item["module"] not in known:
            name = item["module"] or item["node"]
            declined.setdefault((name, item["reason"]), []).append(item["node"])
    rows += [_declined_row(*key, nodes) for key, nodes in declined.items()]
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
        Cell("recognised", tone="good"),
        "; ".join(dict.fromkeys(own)),
        _ms(before[0] if before else None),
        _ms(after[0] if after else None, is_warning=True),
        _ms(after[1] if after else None),
        f"{total} x {query['num_heads']} x {query['head_size']}",
        *_leg_cells(legs),
        format_phases(query["phases"]) if query["phases"] else "flat",
        Cell(str(query["chunks"]), query["chunks"]),
        Cell(str(ranks), ranks),
        Cell(", ".join(behind[:3]) or "nothing", hint=", ".join(behind[:12])),
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
    return Cell(f"{value:.3f}", value, "warn" if is_warning and value >= 0.005 else "")


def _declined_row(name: str, reason: str, nodes: list[str]) -> list[object]:
    where = "" if nodes == [name] else f" (at {', '.join(nodes[:4])})"
    row = ["", name, Cell("declined", tone="bad"), reason + where]
    return row + [""] * (len(_COLUMNS) - len(row))


def exposed_table(page: Mapping[str, Any]) -> Table | None:
    """Returns every exchange that stays exposed, the longest first; None if there is none."""
    final = page["final"]
    found = [item for item in final["exchanges"] if item["exposed_ns"] >= 1000] if final else []
    if not found:
        return None
    columns = (
        Column("exposed ms", True, "how long the rank stands still for it"),
        Column("hidden ms", True),
        Column("carries"),
        Column("where", is_code=True),
        Column("exchange", is_code=True),
        Column("sends", True),
        Column("behind", is_wide=True),
    )
    ordered = sorted(found, key=lambda item: -item["exposed_ns"])
    rows = [_exposed_row(page, item) for item in ordered]
    return Table(columns, rows, "exchanges that stay exposed, the longest first")


def _exposed_row(page: Mapping[str, Any], item: Mapping[str, Any]) -> list[object]:
    tasks, place = page["final"]["tasks"], item["task"]
    hidden = max(0, item["end_ns"] - item["begin_ns"] - item["exposed_ns"]) / 1e6
    behind = ", ".join(tasks["name"][other] for other in item["behind"])
    return [
        _ms(item["exposed_ns"] / 1e6, is_warning=True),
        _ms(hidden),
        carried_by(tasks, place),
        module_of_exchange(page, item),
        tasks["name"][place],
        Cell(format_bytes(tasks["bytes"][place]), tasks["bytes"][place]),
        behind or "nothing",
    ]
