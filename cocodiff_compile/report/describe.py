# SPDX-License-Identifier: Apache-2.0
"""Converts records to plain data for JSON, and to tables for people. It must be called before code
generation consumes the graph that the records refer to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cocodiff_compile.compat import optimization_hint
from cocodiff_compile.cost.tasks import NO_SITE
from cocodiff_compile.decide.shard_report import ShardReport
from cocodiff_compile.ir.layout import Size
from cocodiff_compile.ir.records import Declined, Leg, UlyssesSite
from cocodiff_compile.pipeline.run_passes import PassRecord, PipelineReport
from cocodiff_compile.report.describe_sharing import format_sharing
from cocodiff_compile.report.tables import format_bytes, format_rows
from cocodiff_compile.schedule.estimate import ExchangeEstimate, OrderEstimate, ScheduleEstimate


def number(size: Size) -> int | str:
    """Returns a size for JSON: an integer, or the formula of a symbolic size."""
    return str(size) if isinstance(size, torch.SymInt) else int(size)


def describe_leg(leg: Leg) -> dict[str, Any]:
    exchange = leg.exchange
    return {
        "role": leg.role,
        "exchange": exchange.start.name,
        "wait": exchange.wait.name,
        "group": exchange.group,
        "ranks": list(exchange.ranks),
        "phases": [list(phase.axes) for phase in exchange.pieces[0].phases],
        "chunks": len(exchange.pieces),
        "bytes": number(exchange.size_bytes),
        "wire_bytes": number(exchange.wire_bytes),
        "scatters": "heads" if exchange.direction == "in" else "tokens",
        "gathers": "tokens" if exchange.direction == "in" else "heads",
        "num_heads": number(leg.num_heads),
        "head_size": number(leg.head_size),
        "tokens_per_rank": number(leg.tokens_per_rank),
        "projections": [
            {
                "node": item.node.name,
                "rows": number(item.rows),
                "out_features": number(item.out_features),
                "columns": [number(column) for column in item.columns] if item.columns else None,
            }
            for item in leg.projections
        ],
    }


def describe_site(site: UlyssesSite) -> dict[str, Any]:
    return {
        "site": site.index,
        "module": site.module_path,
        "attention": {
            "form": site.attention.form,
            "node": site.attention.nodes[-1].name,
            "op": str(site.attention.nodes[-1].target),
            "mask": site.attention.mask.name if site.attention.mask else None,
            "is_causal": site.attention.is_causal,
        },
        "packed": site.is_packed,
        "num_exchanges": len(site.pieces),
        "bytes": total_bytes(site),
        "legs": [describe_leg(leg) for leg in site.legs],
        "independent": [node.name for node in site.independent],
    }


def describe_estimate(estimate: ScheduleEstimate, is_ordered: bool) -> dict[str, Any]:
    """Returns an estimate as data, with times in milliseconds: before, and of the order that the
    graph is left in.
    """
    after = estimate.after if is_ordered else estimate.before
    return {
        "is_ordered": is_ordered,
        "before": _describe_order(estimate.before),
        "after": _describe_order(after),
        "exchanges": [
            {
                "exchange": item.span.name,
                "site": item.site,
                "begins": _ms(item.span.begin_s),
                "ends": _ms(item.span.end_s),
                "exposed": _ms(item.exposed_s),
                "hidden": _ms(item.hidden_s),
                "behind": list(item.behind),
            }
            for item in after.exchanges
        ],
    }


def _describe_order(order: OrderEstimate) -> dict[str, Any]:
    by_site: dict[int, list[ExchangeEstimate]] = {}
    for item in order.exchanges:
        by_site.setdefault(item.site, []).append(item)
    return {
        "step": _ms(order.timeline.step_s),
        "compute": _ms(order.timeline.compute_s),
        "exposed": _ms(order.timeline.exposed_s),
        "sites": {
            site: {
                "exposed": _ms(sum(item.exposed_s for item in items)),
                "hidden": _ms(sum(item.hidden_s for item in items)),
            }
            for site, items in by_site.items()
            if site != NO_SITE
        },
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def total_bytes(site: UlyssesSite) -> int:
    """Returns the bytes that a rank puts into this site's exchanges, as first compiled."""
    return sum(optimization_hint(exchange.size_bytes) for exchange in site.exchanges)


def describe_declined(declined: Declined) -> dict[str, str]:
    return {"node": declined.node.name, "module": declined.module_path, "reason": declined.reason}


def describe_pass(record: PassRecord) -> dict[str, Any]:
    return {
        "pass": record.name,
        "changed": record.result.changed,
        "declined": len(record.result.declined),
        "notes": list(record.result.notes),
        "ms": round(record.seconds * 1e3, 3),
    }


def describe_report(report: PipelineReport) -> dict[str, Any]:
    """Returns one graph as plain data."""
    recognition = report.recognition
    return {
        "sites": [describe_site(site) for site in recognition.sites],
        "declined": [describe_declined(item) for item in report.declined],
        "unrelated": [node.name for node in recognition.unrelated],
        "passes": [describe_pass(record) for record in report.passes],
        "decision": dict(report.decision.lines),
        "sharing": report.sharing.to_data() if report.sharing else None,
        "schedule": (
            describe_estimate(report.estimate, report.is_ordered) if report.estimate else None
        ),
        "refused": report.refused,
    }


def format_graph(summary: dict[str, Any]) -> str:
    """Returns the table of one graph: its sites, what was declined, and what each pass did."""
    parts = []
    if summary["refused"]:
        parts.append(f"left to Inductor: {summary['refused']}")
    if summary["sharing"]:
        parts.append(format_sharing(ShardReport.from_data(summary["sharing"])) + "\n")
    if summary["sites"]:
        parts.append(format_rows([_site_row(site) for site in summary["sites"]]))
    else:
        parts.append("no Ulysses attention: Inductor compiles this graph unchanged")
    parts += [
        f"declined  {item['module'] or item['node']}: {item['reason']}"
        for item in summary["declined"]
    ]
    if summary["unrelated"]:
        parts.append(f"unchanged: {len(summary['unrelated'])} all-to-alls of something else")
    parts += [_pass_line(item, summary) for item in summary["passes"]]
    if summary["sites"]:
        decided = "; ".join(f"{what} {value}" for what, value in summary["decision"].items())
        parts.append(f"decided: {decided}")
    if summary["schedule"]:
        parts.append(format_schedule(summary))
    return "\n".join(parts)


def format_schedule(summary: dict[str, Any]) -> str:
    """Returns a table of what the order does to each site, and what its exchanges hide behind."""
    schedule = summary["schedule"]
    ordered = "as ordered" if schedule["is_ordered"] else "left as captured"
    rows = []
    for index, site in enumerate(summary["sites"]):
        before = schedule["before"]["sites"].get(index)
        after = schedule["after"]["sites"].get(index)
        if before is None or after is None:
            continue
        own = [item for item in schedule["exchanges"] if item["site"] == index]
        behind = dict.fromkeys(name for item in own for name in item["behind"])
        rows.append(
            {
                "site": site["site"],
                "module": site["module"] or "?",
                "chunks": site["legs"][0]["chunks"],
                "exposed ms as captured": f"{before['exposed']:.2f}",
                ordered: f"{after['exposed']:.2f}",
                "hidden": f"{after['hidden']:.2f}",
                "why exposed": _why_exposed(own),
                "behind": ", ".join(list(behind)[:4]) or "nothing",
            }
        )
    return f"estimated per step:\n{format_rows(rows)}"


def _why_exposed(exchanges: Sequence[dict[str, Any]]) -> str:
    """Returns the reason for most of the time in which a rank waits for a site."""
    exposed = sum(item["exposed"] > 0 for item in exchanges)
    if not exposed:
        return "not exposed"
    waits = f"{exposed} of {len(exchanges)} exchanges"
    return f"{waits}: nothing else can run until they arrive"


def _site_row(site: dict[str, Any]) -> dict[str, object]:
    legs = site["legs"]
    query = legs[0]
    tokens = query["tokens_per_rank"]
    ranks = len(query["ranks"])
    total = tokens * ranks if isinstance(tokens, int) else f"{ranks}*{tokens}"
    return {
        "site": site["site"],
        "module": site["module"] or "?",
        "tokens x heads x size": f"{total} x {query['num_heads']} x {query['head_size']}",
        "ranks": ranks,
        **_byte_cells(legs),
        "projections q/k/v/o": "/".join(_projection_cell(leg) for leg in legs),
        "independent": f"{len(site['independent'])} matmuls",
    }


def _byte_cells(legs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns the bytes of each role; one that shares the exchange of another says so."""
    cells: dict[str, str] = {}
    owner: dict[str, str] = {}
    for leg in legs:
        role, shared = leg["role"], owner.setdefault(leg["exchange"], leg["role"])
        cells[role] = format_bytes(leg["bytes"]) if shared == role else f"with {shared}"
    return cells


def _projection_cell(leg: dict[str, Any]) -> str:
    fused = any(item["columns"] for item in leg["projections"])
    return f"{len(leg['projections'])}{' fused' if fused else ''}"


def _pass_line(item: dict[str, Any], summary: dict[str, Any]) -> str:
    counts = ""
    if item["pass"] == "recognize-ulysses":
        counts = f"{len(summary['sites'])} recognised, {len(summary['declined'])} declined; "
    notes = "".join(f"{note}; " for note in item["notes"])
    did = "graph rewritten" if item["changed"] else "graph unchanged"
    return f"pass {item['pass']}: {counts}{notes}{did} ({item['ms']:.1f} ms)"
