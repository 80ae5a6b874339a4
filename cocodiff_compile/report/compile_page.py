# SPDX-License-Identifier: Apache-2.0
"""Makes the page of a compile from the data of its graphs: `page_data.describe_page`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cocodiff_compile.decide.shard_report import ShardReport
from cocodiff_compile.report.describe_sharing import format_modules, format_sharing
from cocodiff_compile.report.draw_machine import (
    colours_of_axes,
    draw_machine,
    draw_phases,
    machine_legend,
)
from cocodiff_compile.report.draw_sharing import draw_sharing
from cocodiff_compile.report.page.sections import (
    Card,
    Cell,
    Column,
    DiffView,
    Drawing,
    Facts,
    Legend,
    Part,
    Section,
    Table,
    Text,
    TimelineChart,
    Tone,
)
from cocodiff_compile.report.problems import Problem, find_problems
from cocodiff_compile.report.sites_table import exposed_table, sites_table
from cocodiff_compile.report.tables import format_seconds
from cocodiff_compile.report.v_major_sections import v_major_section
from cocodiff_compile.topology.files import parse_topology

_MUCH_MORE = 2.0
"""How many times the computation exchanges must take for the page to open with that."""
_NO_PROBLEM = (
    "Nothing stands in the way of this graph: no attention was declined, and no exchange is "
    "exposed for long."
)
_TONES: Mapping[str, Tone] = {"error": "bad", "warning": "warn", "note": ""}


def graph_sections(page: Mapping[str, Any]) -> list[Section]:
    """Returns the sections of one graph; those that have nothing to show are left out."""
    sections = [
        _summary(page),
        _problems(page),
        _timeline(page),
        _attentions(page),
        _stages(page),
        _machine(page),
        _sharing(page),
        _settings(page),
    ]
    return [section for section in sections if section is not None]


def run_sections(page: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> list[Section]:
    """Returns the sections about how a graph ran, which stand behind those about the graph."""
    is_off = page["options"]["v_major"]["value"] == "None"
    return [] if is_off else [v_major_section(recorded)]


def graph_name(page: Mapping[str, Any], number: int) -> str:
    """Returns what a page calls a graph: its place, the kind of step, what is in it."""
    sites = page["summary"]["sites"]
    kind = f", steps {page['kind']}" if page["options"]["v_major"]["value"] != "None" else ""
    first = f": {sites[0]['module']}" if sites and sites[0]["module"] else ""
    urgent = sum(item.severity != "note" for item in find_problems(page))
    return f"{number}{kind}{first}, attentions: {len(sites)}, problems: {urgent}"


def _summary(page: Mapping[str, Any]) -> Section:
    summary, final, captured = page["summary"], page["final"], page["captured"]
    declined = len(summary["declined"])
    facts = _step_facts(captured or final, final) if final else []
    facts += [
        (
            "Ulysses attentions",
            str(len(summary["sites"])),
            f"{declined} declined" if declined else "none declined",
        ),
        ("nodes", f"{page['num_nodes']:,}", f"graph {page['graph']} of rank {page['rank']}"),
    ]
    if summary["sharing"]:
        sharing = ShardReport.from_data(summary["sharing"])
        what = "estimated" if sharing.is_applied else "estimated, not applied"
        facts.append((f"sharing over {sharing.num_ranks} ranks", f"{sharing.gain:.2f}x", what))
    for machine in page["machines"][:1]:
        topology = machine["topology"]
        axes = " x ".join(f"{axis['size']} {axis['name']}" for axis in topology["axes"])
        how = "measured" if machine["is_measured"] else "by its figures"
        facts.append(
            ("machine", f"{topology['name']}", f"{machine['num_ranks']} ranks: {axes}, {how}")
        )
    if page["device"]:
        facts.append(("device", page["device"], "the device that estimates are for"))
    return Section("Summary", "Summary", (Facts(facts),), _lead(page))


def _lead(page: Mapping[str, Any]) -> str:
    kind = "A dry run: nothing was computed. " if page["is_dry_run"] else ""
    return f"{_verdict(page)}{kind}Times are estimates of the cost model for one step of one rank."


def _verdict(page: Mapping[str, Any]) -> str:
    """Returns in a sentence or two what a reader should know first."""
    declined = [item for item in find_problems(page) if item.kind == "attention declined"]
    said = "An attention was declined. " if len(declined) == 1 else ""
    if len(declined) > 1:
        said = f"Attentions were declined, for {len(declined)} reasons. "
    final = page["final"]
    if final and final["in_flight_ns"] > _MUCH_MORE * final["compute_ns"] > 0:
        times = (format_seconds(final[key] / 1e9) for key in ("in_flight_ns", "compute_ns"))
        said += "Links are busy for {} of a step that computes for {}: ".format(*times)
        said += "no order can hide that; send less, or use faster links. "
    return said


def _step_facts(
    captured: Mapping[str, Any], final: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    gain = captured["step_ns"] / final["step_ns"] if final["step_ns"] else 1.0
    before, after = captured["step_ns"] / 1e9, final["step_ns"] / 1e9
    exposed = final["exposed_ns"] / 1e9
    share = exposed / after * 100 if after else 0.0
    return [
        (
            "gained, estimated",
            f"{gain:.2f}x",
            f"{format_seconds(before)} -> {format_seconds(after)} a step",
        ),
        (
            "exposed",
            format_seconds(exposed),
            f"{share:.1f} % of the step; {_seconds(captured, 'exposed_ns')} as captured",
        ),
        (
            "hidden",
            format_seconds(max(0.0, final["in_flight_ns"] / 1e9 - exposed)),
            f"of {format_seconds(final['in_flight_ns'] / 1e9)} in which something is on the links",
        ),
    ]


def _seconds(order: Mapping[str, Any], key: str) -> str:
    return format_seconds(order[key] / 1e9)


def _passes(page: Mapping[str, Any]) -> Part:
    rows = [
        (item["pass"], "rewritten" if item["changed"] else "unchanged",
         "; ".join(item["notes"]), Cell(f"{item['ms']:.1f}", item["ms"]))
        for item in page["summary"]["passes"]
    ]  # fmt: skip
    columns = (
        Column("pass"),
        Column("graph"),
        Column("notes", is_wide=True),
        Column("ms", True),
    )
    return Table(columns, rows, "passes, in the order they ran", has_filter=False)


def _problems(page: Mapping[str, Any]) -> Section:
    found = find_problems(page)
    parts: list[Part] = [_card(item) for item in found if item.severity != "note"]
    notes = [item for item in found if item.severity == "note"]
    if not parts:
        parts.append(Text(_NO_PROBLEM))
    parts += [table] if (table := exposed_table(page)) else []
    parts += [_card(item) for item in notes]
    urgent = len(found) - len(notes)
    return Section(
        "Problems",
        "Problems and what to do",
        parts,
        "What was declined, what stays exposed (largest first), then notes; each with a remedy. "
        "Options are those of torch.compile(model, backend='cocodiff', options={...}).",
        count=urgent,
    )


def _card(problem: Problem) -> Card:
    times = f" (at {problem.count} places)" if problem.count > 1 and not problem.cost_s else ""
    return Card(
        _TONES[problem.severity],
        problem.kind,
        problem.title + times,
        problem.where,
        problem.reason,
        problem.remedies,
    )  # fmt: skip


def _timeline(page: Mapping[str, Any]) -> Section | None:
    if page["final"] is None:
        return None
    orders = [order for order in (page["captured"], page["final"]) if order]
    group = page["machines"][0]["group"] if len(page["machines"]) == 1 else None
    charts = [_chart(order, group) for order in orders]
    chart = TimelineChart({"charts": charts}, "The estimated step as captured and as ordered")
    return Section(
        "Timeline",
        "The step, as captured and as ordered",
        (chart,),
        "Above: the graph as it came. Below: as it runs now. Both on one scale; one lane computes, "
        "the others are links. A wait is the exposed part of an exchange.",
    )


def _chart(order: Mapping[str, Any], group: str | None) -> dict[str, Any]:
    """Returns what the page draws of an order; links without the name of their only group."""
    lanes = [
        ", ".join(part.strip().removeprefix(f"{group} ") for part in lane.split(","))
        if group is not None
        else lane
        for lane in order["lanes"]
    ]
    keys = ("task", "exposed_ns", "queued_ns")
    exchanges = [{key: item[key] for key in keys} for item in order["exchanges"]]
    return {**order, "lanes": lanes, "exchanges": exchanges}


def _attentions(page: Mapping[str, Any]) -> Section | None:
    table = sites_table(page)
    if table is None:
        return None
    return Section(
        "Attentions",
        "Attentions",
        (table,),
        "Every attention with exchanges: what Q, K, V and O each send, in which phases and "
        "chunks, how long it is exposed, and why one was declined.",
        count=len(table.rows),
    )


def _stages(page: Mapping[str, Any]) -> Section | None:
    stages = page["stages"]
    if not stages["stages"]:
        return None
    diff = DiffView(stages, "Lines of the graph, compared with the stage before")
    return Section(
        "Graph",
        "The graph after each pass",
        (_passes(page), diff),
        "Notes and changes of each pass, then a line for each node; unchanged lines are folded.",
        prints_open=False,
    )


def _machine(page: Mapping[str, Any]) -> Section | None:
    if not page["machines"]:
        return None
    parts: list[Part] = []
    for machine in page["machines"]:
        topology = parse_topology(machine["topology"])
        parts += [
            Drawing(draw_machine(topology), f"{topology.name}: {topology.num_ranks} ranks"),
            Legend(machine_legend(topology)),
        ]
        if machine["phases"]:
            svg = draw_phases(machine["phases"], colours_of_axes(topology))
            parts.append(Drawing(svg, "exchanges by size: in phases, and in one phase"))
        else:
            parts.append(Text("Exchanges run in one phase (tapa is off, or there is one axis)."))
    return Section(
        "Machine",
        "Machine and phases",
        parts,
        "The axes under the Ulysses group, the links that join them, and how exchanges run.",
    )


def _sharing(page: Mapping[str, Any]) -> Section | None:
    if not page["summary"]["sharing"]:
        return None
    sharing = ShardReport.from_data(page["summary"]["sharing"])
    svg = draw_sharing(sharing).replace("<svg ", '<svg class="sharing" ', 1)
    return Section(
        "Sharing",
        "What is shared out over ranks",
        (
            Drawing(svg, "modules in the order of the program"),
            Text(format_sharing(sharing), is_code=True),
            Text(format_modules(sharing), is_code=True),
        ),
        "What shard-tokens gives each rank a share of, what it gathers, and what is whole and why.",
    )


def _settings(page: Mapping[str, Any]) -> Section:
    options = [
        (name, item["value"], "" if item["is_default"] else Cell("set", tone="good"))
        for name, item in page["options"].items()
    ]
    versions = [(name, version, "") for name, version in page["versions"].items()]
    decided = [(name, value) for name, value in page["summary"]["decision"].items()]
    columns = (Column("option"), Column("value", is_code=True, is_wide=True), Column(""))
    return Section(
        "Settings",
        "Options, versions, decision",
        (
            Table(columns, [*options, *versions], "options and versions", has_filter=False),
            Table(
                (Column("choice"), Column("decided", is_wide=True)),
                decided,
                "decided",
                has_filter=False,
            ),
            Text(page["text"], is_code=True),
        ),
        "Everything above as text, too, as `explain` prints it.",
        is_open=False,
    )


def page_title(pages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns title and subtitle of a page over these graphs."""
    attentions = sum(len(page["summary"]["sites"]) for page in pages)
    declined = sum(len(page["summary"]["declined"]) for page in pages)
    if not pages:
        return "cocodiff", "no inference graph was captured"
    versions = ", ".join(f"{name} {version}" for name, version in pages[0]["versions"].items())
    graphs = f"{len(pages)} graph{'s' if len(pages) > 1 else ''}"
    return (
        f"cocodiff: rank {pages[0]['rank']}",
        f"{graphs}, Ulysses attentions: {attentions}, declined: {declined}; {versions}",
    )
