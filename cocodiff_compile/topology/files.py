# SPDX-License-Identifier: Apache-2.0
"""Reads a topology from a JSON or YAML file, checks it field by field, and converts it back.

    name: two-nodes
    copy_bytes_per_s: 1.0e+10
    links:
      pcie:     {bytes_per_s: 2.0e+10, latency_s: 5.0e-6}
      ethernet: {bytes_per_s: 1.25e+9, latency_s: 5.0e-5, ranks_per_link: 2}
    axes:                                     # innermost first
      - {name: tile, size: 2, link: pcie}
      - {name: node, size: 2, link: ethernet}

Instead of `axes`, `boxes` may list sets of ranks that a link joins; each link is then an axis of
that name:

    boxes:
      - {link: pcie, ranks: [0, 1]}
      - {link: pcie, ranks: [2, 3]}
      - {link: ethernet, ranks: 0-3}

The size of a file is bounded (`read_plain_data.py`, and the limits below), so that any file is read
or refused within a second.

Optional per link: `both_ways_bytes_per_s` (twice one way), `ranks_per_link` (1),
`unaligned_from_bytes` (never). Optional beside `axes`: `measured`, a list of
`{axes: [tile], points: [[bytes per rank, seconds], ...]}`, which `cocodiff topology auto --save`
writes; along no axis it is the time of the copies between two phases. With `in_flight: 4` it is the
time of each of four concurrent exchanges.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import has_text_keys, number, shown, shown_keys, whole_number
from cocodiff_compile.topology.axes import MAX_RANKS, Axis, Link, Topology
from cocodiff_compile.topology.measured_phase import MeasuredPhase
from cocodiff_compile.topology.rank_graph import Box, fold, graph_of_boxes
from cocodiff_compile.topology.read_plain_data import read_plain_data

_LINK_FIELDS = tuple(field.name for field in dataclasses.fields(Link) if field.name != "name")

LEAST, MOST = 1e-30, 1e30
MAX_NAME = 100
MAX_LINKS = 64
MAX_LISTED_RANKS = 16_384
"""The ranks of all boxes together; they are folded into axes within a second."""


def load_topology(path: Path) -> Topology:
    """Returns the topology in a file. Raises UserError with file, field and what is allowed."""
    try:
        return parse_topology(read_plain_data(path))
    except UserError as error:
        raise UserError(f"topology file {shown(str(path))[1:-1]}: {error}") from None


def parse_topology(data: object) -> Topology:
    """Returns the topology that plain data describe."""
    form = "boxes" if isinstance(data, Mapping) and "boxes" in data else "axes"
    needed = ("name", "copy_bytes_per_s", "links", form)
    fields = _mapping("the file", data, needed, optional=("measured",) if form == "axes" else ())
    named = _mapping("links", fields["links"])
    if len(named) > MAX_LINKS:
        raise UserError(f"links has {len(named)} entries; allowed: {MAX_LINKS}")
    links = {name: _link(name, value) for name, value in named.items()}
    copy_bytes_per_s = _positive("copy_bytes_per_s", fields["copy_bytes_per_s"])
    name = _name("name", fields["name"])
    if form == "boxes":
        boxes = _boxes(_list(fields, "boxes"), links)
        _refuse_rank_twice(boxes)
        ranks = sorted({rank for box in boxes for rank in box.ranks})
        return fold(graph_of_boxes(name, copy_bytes_per_s, ranks, boxes))
    axes = tuple(_axis(index, axis, links) for index, axis in enumerate(_list(fields, "axes")))
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise UserError(f"axes are named {shown_keys(names)}; allowed: each name once")
    measured = tuple(map(_measured, _list({"measured": [], **fields}, "measured", 0)))
    return Topology(name, axes, copy_bytes_per_s, measured)


def topology_data(topology: Topology) -> dict[str, Any]:
    """Returns plain data that `parse_topology` turns into an equal topology, even through JSON."""
    links = {
        axis.link.name: {
            field: value
            for field in _LINK_FIELDS
            if (value := getattr(axis.link, field)) is not None
        }
        for axis in topology.axes
    }
    return {
        "name": topology.name,
        "copy_bytes_per_s": topology.copy_bytes_per_s,
        "links": links,
        "axes": [
            {"name": axis.name, "size": axis.size, "link": axis.link.name} for axis in topology.axes
        ],
        "measured": [
            {
                "axes": list(phase.axes),
                "points": [list(point) for point in phase.points],
                "in_flight": phase.in_flight,
            }
            for phase in topology.measured
        ],
    }


def _mapping(
    what: str, value: object, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not has_text_keys(value):
        raise UserError(f"{what} is {shown(value)}; allowed: a mapping with text keys")
    missing = [name for name in required if name not in value]
    unknown = [name for name in value if required and name not in (*required, *optional)]
    if missing or unknown:
        more = f"; optional: {', '.join(optional)}" if optional else ""
        raise UserError(
            f"{what} has the keys {shown_keys(value)}; needed: {', '.join(required)}{more}"
        )
    return value


def _list(fields: Mapping[str, Any], key: str, at_least: int = 1) -> list[object]:
    value = fields[key]
    if not isinstance(value, list) or len(value) < at_least:
        order = ", innermost first" if key == "axes" else ""
        raise UserError(f"{key} is {shown(value)}; allowed: a list of {key}{order}")
    return value


def _name(what: str, value: object) -> str:
    """Returns printable text for a name; a number, as which YAML reads `12`, is accepted."""
    whole = whole_number(value)
    text = str(whole) if whole is not None and 0 <= whole < MAX_RANKS else value
    if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME or not text.isprintable():
        raise UserError(
            f"{what} is {shown(value)}; allowed: text of 1 to {MAX_NAME} printable characters"
        )
    return text


def _link(key: str, value: object) -> Link:
    name = _name("a name in links", key)
    fields = _mapping(f"link {name!r}", value)
    unknown = [field for field in fields if field not in _LINK_FIELDS]
    if unknown or "bytes_per_s" not in fields or "latency_s" not in fields:
        raise UserError(
            f"link {name!r} has the keys {shown_keys(fields)}; needed: bytes_per_s, "
            f"latency_s; allowed: {', '.join(_LINK_FIELDS)}"
        )
    numbers = {field: _positive(f"{field} of link {name!r}", fields[field]) for field in fields}
    numbers.setdefault("both_ways_bytes_per_s", min(2 * numbers["bytes_per_s"], MOST))
    return Link(name, **numbers)


def _axis(index: int, value: object, links: Mapping[str, Link]) -> Axis:
    fields = _mapping(f"axis {index}", value, ("name", "size", "link"))
    size = whole_number(fields["size"])
    if size is None or not 2 <= size <= MAX_RANKS:
        raise UserError(
            f"size of axis {index} is {shown(fields['size'])}; allowed: a whole number from 2 "
            f"to {MAX_RANKS}"
        )
    name = _name(f"name of axis {index}", fields["name"])
    return Axis(name, size, _known_link(f"axis {index}", fields["link"], links))


def _boxes(values: list[object], links: Mapping[str, Link]) -> list[Box]:
    boxes: list[Box] = []
    left = MAX_LISTED_RANKS
    for index, value in enumerate(values):
        fields = _mapping(f"box {index}", value, ("link", "ranks"))
        link = _known_link(f"box {index}", fields["link"], links)
        ranks = _rank_list(f"ranks of box {index}", fields["ranks"], left)
        boxes.append(Box(link.name, link, ranks))
        left -= len(ranks)
    return boxes


def _rank_list(what: str, value: object, most: int) -> tuple[int, ...]:
    """Reads `[0, 1, 2]` or `0-2`, and refuses more than `most` ranks before it expands them."""
    ranks = _span(value) if isinstance(value, str) else value
    if not isinstance(ranks, (list, range)) or len(ranks) < 2:
        raise UserError(
            f"{what} is {shown(value)}; allowed: two ranks or more, as [0, 1, 2] or 0-2"
        )
    if len(ranks) > most:
        raise UserError(
            f"{what} is {shown(value)}; allowed: {MAX_LISTED_RANKS} ranks in all boxes together; "
            "describe a larger machine by axes"
        )
    for rank in ranks:
        if whole_number(rank) is None or not 0 <= rank < MAX_LISTED_RANKS:
            raise UserError(
                f"{what} is {shown(value)}; allowed: two ranks or more, each a whole number from "
                f"0 to {MAX_LISTED_RANKS - 1}"
            )
    return tuple(sorted(ranks))


def _span(text: str) -> range | None:
    match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", text)
    return range(int(match[1]), int(match[2]) + 1) if match else None


def _refuse_rank_twice(boxes: list[Box]) -> None:
    """Raises UserError if two boxes of one link share a rank: they would become one box."""
    times = Counter((box.link.name, rank) for box in boxes for rank in box.ranks)
    for (link, rank), count in times.items():
        if count > 1:
            raise UserError(
                f"rank {rank} is listed {count} times in the boxes of link {link!r}; allowed: once"
            )


def _measured(value: object) -> MeasuredPhase:
    fields = _mapping("an entry of measured", value, ("axes", "points"), ("in_flight",))
    axes = tuple(_name("an axis of measured", axis) for axis in _list(fields, "axes", 0))
    points = fields["points"]
    if not isinstance(points, list) or not all(
        isinstance(point, list) and len(point) == 2 for point in points
    ):
        raise UserError(f"points of measured are {shown(points)}; allowed: [[bytes, seconds], ...]")
    in_flight = whole_number(fields.get("in_flight", 1))
    if in_flight is None or not 1 <= in_flight <= MAX_RANKS:
        raise UserError(
            f"in_flight of measured is {shown(fields['in_flight'])}; allowed: a whole number from "
            f"1 to {MAX_RANKS}"
        )
    pairs = tuple(
        (_positive("bytes in points of measured", size), _positive("seconds in the points", time))
        for size, time in points
    )
    return MeasuredPhase(axes, pairs, in_flight)


def _known_link(what: str, name: object, links: Mapping[str, Link]) -> Link:
    if not isinstance(name, str) or name not in links:
        raise UserError(f"link of {what} is {shown(name)}; defined links: {shown_keys(links)}")
    return links[name]


def _positive(what: str, value: object) -> float:
    """Returns a number within bounds that keep products and quotients from overflowing."""
    checked = number(value)
    if checked is None or not LEAST <= checked <= MOST:
        raise UserError(
            f"{what} is {shown(value)}; allowed: a number above 0 (from {LEAST:g} to {MOST:g})"
        )
    return checked
