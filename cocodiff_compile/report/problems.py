# SPDX-License-Identifier: Apache-2.0
"""Finds in the data of a graph's page what went wrong or could go better, the worst first: what was
declined, what stays exposed, what passes left alone. Each problem says what can be done about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cocodiff_compile.report.describe_sharing import MODULE_NUMBER, joined_name
from cocodiff_compile.report.exposed import GATHERED, Exposed, exposed_exchanges
from cocodiff_compile.report.remedies import remedy_for, remedy_for_note
from cocodiff_compile.report.tables import format_bytes, format_seconds

Severity = Literal["error", "warning", "note"]
_SHARE_OF_STEP = 0.005
"""An exchange that is exposed for less than this part of a step, all alike together, is a note."""
MAX_EXPOSED = 12


@dataclass(frozen=True)
class Problem:
    """One thing to look at: what and where it is, why it is so, and what can be done about it."""

    severity: Severity
    kind: str
    title: str
    where: str
    reason: str
    remedies: tuple[str, ...]
    cost_s: float = 0.0
    """The time of a step that it is estimated to cost."""
    count: int = 1


def find_problems(page: Mapping[str, Any]) -> list[Problem]:
    """Returns the problems of one graph: what was refused, what is exposed, the rest."""
    found = [
        *_refused(page),
        *_lost_order(page),
        *_declined(page),
        *_exposed(page),
        *_notes(page),
        *_no_estimate(page),
        *_nothing_found(page),
    ]
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda item: rank[item.severity])


def _refused(page: Mapping[str, Any]) -> Iterable[Problem]:
    if reason := page["summary"]["refused"]:
        yield Problem(
            "error",
            "graph left to Inductor",
            "Nothing was done to this graph",
            f"graph {page['graph']}",
            reason,
            (
                "This is a graph that torch captured in a way the passes do not know: try "
                "fullgraph=True, another version of torch (docs/compatibility.md), or leave the op "
                "that the reason names out of the compiled region.",
            ),
        )


def _lost_order(page: Mapping[str, Any]) -> Iterable[Problem]:
    if page.get("lost_order"):
        yield Problem(
            "error",
            "order not kept",
            "Inductor did not keep the new order",
            f"graph {page['graph']}",
            "the generated code starts or awaits exchanges in a different order from the chosen "
            "one, so exchanges may be exposed; results are the same",
            (
                "Run with a version of torch that docs/compatibility.md lists, and without other "
                "custom passes that move nodes; options={'v_first': False} leaves the order to "
                "Inductor.",
            ),
        )


def _declined(page: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each reason, however many modules it was given for."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in page["summary"]["declined"]:
        names = (MODULE_NUMBER.sub("*", item["module"] or item["node"]), _shape_of(item["reason"]))
        groups.setdefault(names, []).append(item)
    return [_declined_problem(items) for items in groups.values()]


def _shape_of(reason: str) -> str:
    return "".join("#" if letter.isdigit() else letter for letter in reason)


def _declined_problem(items: Sequence[Mapping[str, Any]]) -> Problem:
    first = items[0]
    is_cut = "cannot be cut" in first["reason"] or "no tokens are skipped" in first["reason"]
    is_uncoded = "uncompressed" in first["reason"]
    title = "Declined: exchanges stay as the model has them"
    kind = "attention declined"
    if is_cut or is_uncoded:
        kind = "rewrite declined"
        title = "Not cut into chunks" if is_cut else "Sent uncompressed"
    return Problem(
        "note" if is_cut or is_uncoded else "error",
        kind,
        title,
        _where(items),
        first["reason"],
        (remedy_for(first["reason"]),),
        count=len(items),
    )


def _where(items: Sequence[Mapping[str, Any]]) -> str:
    named = [item["module"] for item in items if item["module"]]
    if len(named) < len(items):
        return ", ".join(item["node"] for item in items[:6])
    name = joined_name(list(dict.fromkeys(named)))
    nodes = ", ".join(item["node"] for item in items[:3])
    return f"{name} (at {nodes}{', ...' if len(items) > 3 else ''})"


def _exposed(page: Mapping[str, Any]) -> Iterable[Problem]:
    """Yields what is exposed for long, the longest first, and the rest as one note."""
    found = exposed_exchanges(page)
    step_s = page["final"]["step_ns"] / 1e9 if page["final"] else 0.0
    long = [item for item in found if item.exposed_s >= _SHARE_OF_STEP * step_s][:MAX_EXPOSED]
    for item in long:
        yield _exposed_problem(item, step_s)
    if rest := found[len(long) :]:
        seconds = format_seconds(sum(item.exposed_s for item in rest))
        yield Problem(
            "note",
            "exchange exposed",
            f"{sum(item.count for item in rest)} more exchanges, exposed for {seconds} together",
            joined_all(f"{item.what} of {item.where}" for item in rest[:6]),
            "each costs little by itself; 'Next exposed' in the timeline steps through them",
            rest[0].remedies,
        )


def joined_all(names: Iterable[str]) -> str:
    """Returns different names as one text."""
    return ", ".join(dict.fromkeys(names))


def _exposed_problem(item: Exposed, step_s: float) -> Problem:
    share = f", {item.exposed_s / step_s * 100:.1f} % of the step" if step_s else ""
    times = f"{item.times}: " if "," in item.times else f"{item.what}: "
    exposed = f"{times}{format_seconds(item.exposed_s)} exposed{share}"
    size = f" ({format_bytes(item.size_bytes)} each)" if item.size_bytes else ""
    return Problem(
        "note" if item.what == GATHERED else "warning",
        "exchange exposed",
        exposed,
        f"{item.where}{size}, {_times(item.count)}, the longest at {item.first}",
        item.reason,
        item.remedies,
        item.exposed_s,
        item.count,
    )


def _times(count: int) -> str:
    return f"{count} exchanges" if count > 1 else "1 exchange"


def _notes(page: Mapping[str, Any]) -> Iterable[Problem]:
    for item in page["summary"]["passes"]:
        for note in item["notes"]:
            if remedy := remedy_for_note(note):
                is_unshared = "not shared out" in note
                yield Problem(
                    "warning" if is_unshared else "note",
                    "pass declined",
                    f"{item['pass']} left the graph as it was",
                    f"graph {page['graph']}",
                    note,
                    (remedy,),
                )


def _no_estimate(page: Mapping[str, Any]) -> Iterable[Problem]:
    if not page["summary"]["sites"] or page["final"]:
        return
    options = page["options"]
    if options["v_first"]["value"] == "False" or "schedule-v-first" in options["disable"]["value"]:
        reason = "the pass schedule-v-first is turned off, so exchanges are not hidden"
        remedy = "Set options={'v_first': True} (the default), and leave it out of 'disable'."
    elif options["decision"]["value"] != "None":
        yield Problem(
            "note",
            "no estimate",
            "The order was taken from a file of decisions",
            f"graph {page['graph']}",
            "nothing is measured or estimated where a decision is given",
            ("Compile once without the option 'decision' to see a timeline.",),
        )
        return
    else:
        reason = "on this kind of device, or in this process, exchanges cannot overlap computation"
        remedy = "`cocodiff doctor` says what keeps exchanges from running beside computation."
    yield Problem(
        "warning",
        "no order",
        "Exchanges were not hidden behind computation",
        f"graph {page['graph']}",
        reason,
        (remedy,),
    )


def _nothing_found(page: Mapping[str, Any]) -> Iterable[Problem]:
    summary = page["summary"]
    if summary["sites"] or summary["declined"] or summary["refused"]:
        return
    disabled = "recognize-ulysses" in page["options"]["disable"]["value"]
    remedy = (
        "Take 'recognize-ulysses' out of the option 'disable'."
        if disabled
        else "If no graph of the model has one, options={'shard': 'tokens'} makes it of a plain "
        "model; a process group must be initialised before the model is compiled."
    )
    yield Problem(
        "note",
        "no Ulysses attention",
        "No exchange around an attention in this graph",
        f"graph {page['graph']}",
        "Inductor compiles this graph unchanged",
        (remedy,),
    )
