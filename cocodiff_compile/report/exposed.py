# SPDX-License-Identifier: Apache-2.0
"""Explains why exchanges stay exposed in the order that was chosen, and what would hide them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocodiff_compile.report.describe_sharing import MODULE_NUMBER, joined_name
from cocodiff_compile.report.tables import format_seconds

GATHERED = "shares that are gathered"
_LEAST_S = 1e-6
"""What is exposed for less is not worth a word."""


@dataclass(frozen=True)
class Exposed:
    """Exchanges that are alike and stay exposed: their times together, the first one's node."""

    what: str
    """What they carry: `Q, K`."""
    times: str
    """How long each of these is exposed, as text."""
    where: str
    first: str
    reason: str
    remedies: tuple[str, ...]
    exposed_s: float
    size_bytes: int
    count: int


def exposed_exchanges(page: Mapping[str, Any]) -> list[Exposed]:
    """Returns what is exposed in the final order, alike ones together, the longest first."""
    final = page["final"]
    if final is None:
        return []
    groups: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for item in final["exchanges"]:
        if item["exposed_ns"] / 1e9 < _LEAST_S:
            continue
        where = MODULE_NUMBER.sub("*", module_of_exchange(page, item))
        is_gathered = carried_by(final["tasks"], item["task"]) == GATHERED
        groups.setdefault((is_gathered, where), []).append(item)
    found = [_exposed(page, items) for items in groups.values()]
    return sorted(found, key=lambda item: -item.exposed_s)


def carried_by(tasks: Mapping[str, Any], place: int) -> str:
    """Returns what a collective carries: `Q`, `O`; what it does where it is of no attention."""
    if role := tasks["role"][place]:
        return str(role)
    return GATHERED if "all_gather" in tasks["op"][place] else "other tensors"


def module_of_exchange(page: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    """Returns where in the model an exchange is: the attention, the module, at least the node."""
    tasks, sites = page["final"]["tasks"], page["summary"]["sites"]
    site = tasks["site"][item["task"]]
    known = sites[site]["module"] if 0 <= site < len(sites) else ""
    return known or tasks["module"][item["task"]] or tasks["name"][item["task"]]


def _exposed(page: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> Exposed:
    tasks = page["final"]["tasks"]
    first = max(items, key=lambda item: item["exposed_ns"])
    times: dict[str, int] = {}
    for item in items:
        what = carried_by(tasks, item["task"])
        times[what] = times.get(what, 0) + item["exposed_ns"]
    ordered = sorted(times, key=lambda what: -times[what])
    modules = list(dict.fromkeys(module_of_exchange(page, item) for item in items))
    return Exposed(
        what=", ".join(ordered),
        times=", ".join(f"{what} {format_seconds(times[what] / 1e9)}" for what in ordered),
        where=joined_name(modules),
        first=tasks["name"][first["task"]],
        reason=_reason(page, first, len(items)),
        remedies=tuple(_remedies(page, items)),
        exposed_s=sum(times.values()) / 1e9,
        size_bytes=tasks["bytes"][first["task"]],
        count=len(items),
    )


def _reason(page: Mapping[str, Any], item: Mapping[str, Any], count: int) -> str:
    tasks = page["final"]["tasks"]
    total_s = (item["end_ns"] - item["begin_ns"]) / 1e9
    hidden_s = max(0.0, total_s - item["exposed_ns"] / 1e9)
    role = carried_by(tasks, item["task"])
    which = f"the longest of them, {role}," if count > 1 else "it"
    if item["queued_ns"] / 1e9 >= _LEAST_S:
        queued = format_seconds(item["queued_ns"] / 1e9)
        which = f"{which} waits {queued} until other exchanges have left its links, then"
    which = f"{which} takes"
    if not item["behind"]:
        return (
            f"{which} {format_seconds(total_s)} on the links, and nothing that could run meanwhile "
            "is left: everything else needs what it brings, or has to run before it"
        )
    names = ", ".join(tasks["name"][place] for place in item["behind"][:2])
    return (
        f"{which} {format_seconds(total_s)} on the links, {format_seconds(hidden_s)} of it hidden "
        f"behind {names}; then the rank waits, since nothing else can run until it arrives"
    )


def _remedies(page: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yields what may hide these exchanges, what costs least first."""
    sites = {page["final"]["tasks"]["site"][item["task"]] for item in items}
    known = [
        page["summary"]["sites"][site]
        for site in sorted(sites)
        if 0 <= site < len(page["summary"]["sites"])
    ]
    if carried_by(page["final"]["tasks"], items[0]["task"]) == GATHERED:
        yield (
            "Something needs the whole here: the section on sharing says what reads it. What the "
            "graph returns must be gathered once; between blocks that are compiled one by one "
            "(compile_repeated_blocks) shares are handed on instead."
        )
        return
    if not known:
        yield (
            "No attention that was recognised sends this: see what was declined above, or let "
            "options={'shard': 'tokens'} place the exchanges."
        )
        return
    yield from _busy_links(page)
    yield from _packed(known)
    yield from _order(page)
    yield from _head_chunks(page, known, sorted(sites))
    yield from _token_chunks(page)
    yield from _phases(page)
    if page["options"]["v_major"]["value"] == "None":
        yield "If a lossy result will do, options={'v_major': {}} sends fewer bytes."


def _packed(sites: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if any(site["packed"] for site in sites):
        yield (
            "Exchange Q, K and V each by itself: here they share one all-to-all, which can only "
            "start when all three are computed. V can then be sent while Q and K are computed."
        )


def _order(page: Mapping[str, Any]) -> Iterable[str]:
    if page["is_ordered"]:
        return
    notes = _notes_of(page, "schedule-v-first")
    said = f" ({notes[-1]})" if notes else ""
    yield f"The captured order was kept{said}: more work must become independent to reorder it."


def _head_chunks(
    page: Mapping[str, Any], sites: Sequence[Mapping[str, Any]], places: Sequence[int]
) -> Iterable[str]:
    counts = page["head_chunks"]
    if any(place < len(counts) and counts[place] > 1 for place in places):
        return
    option = page["options"]["head_chunks"]["value"]
    query = sites[0]["legs"][0]
    heads, ranks = query["num_heads"], len(query["ranks"])
    own = heads // ranks if isinstance(heads, int) else 0
    if own == 1:
        yield (
            f"Each of the {ranks} ranks has one head, which cannot be cut into chunks: use fewer "
            "ranks for one call, for example options={'shard': {'degree': "
            f"{max(2, ranks // 2)}}}}}, so that one group of heads computes while another is sent."
        )
    elif option in ("1", "auto") or "chunk-heads" in page["options"]["disable"]["value"]:
        count = next((number for number in range(2, own + 1) if own % number == 0), 2)
        yield (
            f"{_set('head_chunks', count, option)}: one group of heads is computed while the next "
            f"is on the links; a rank has {own or 'some'} heads{_unless_tried(option)}."
        )


def _token_chunks(page: Mapping[str, Any]) -> Iterable[str]:
    if not page["summary"]["decision"].get("token chunks", "").startswith("1,"):
        return
    option, notes = page["options"]["token_chunks"]["value"], _notes_of(page, "chunk-tokens")
    yield (
        f"{_set('token_chunks', 2, option)}: what lies between attentions is computed for one half "
        f"of the tokens while the other half is on the links{_unless_tried(option, notes)}."
    )


def _set(option: str, count: int, value: str) -> str:
    return f"{'Try' if value == 'auto' else 'Set'} options={{'{option}': {count}}}"


def _unless_tried(value: str, notes: Sequence[str] = ()) -> str:
    """Returns what is known of a choice that was left to the cost model."""
    if value != "auto":
        return f" (the option is {value} now)"
    said = f": {notes[-1]}" if notes else ""
    return f" ('auto' did not choose it, by its estimate{said}; measure whether that holds)"


def _notes_of(page: Mapping[str, Any], name: str) -> list[str]:
    passes = page["summary"]["passes"]
    return [note for item in passes if item["pass"] == name for note in item["notes"]]


def _busy_links(page: Mapping[str, Any]) -> Iterable[str]:
    final = page["final"]
    if final["in_flight_ns"] > 0.9 * final["compute_ns"]:
        busy = format_seconds(final["in_flight_ns"] / 1e9)
        computing = format_seconds(final["compute_ns"] / 1e9)
        yield (
            f"Something is on the links for {busy} of the step, and a rank computes for "
            f"{computing}: no order can hide everything. Use faster links, fewer ranks for one "
            "image, or a larger batch or resolution (computing grows faster than bytes)."
        )


def _phases(page: Mapping[str, Any]) -> Iterable[str]:
    is_flat = page["summary"]["decision"].get("phases") == "flat"
    machines = [machine for machine in page["machines"] if len(machine["axes"]) > 1]
    if page["options"]["tapa"]["value"] == "off" and machines:
        yield "Set options={'tapa': 'auto'}: exchanges can run in phases along this machine's axes."
    elif is_flat and not machines:
        yield (
            "If ranks are on several nodes, describe the machine with the option 'topology': it "
            "is taken for one axis now, so that exchanges cannot run in phases."
        )
