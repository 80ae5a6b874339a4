"""A topology from a JSON or YAML file, checked field by field, and back to plain data.

    name: two-nodes
    copy_bytes_per_s: 1.0e+10
    links:
      pcie:     {bytes_per_s: 2.0e+10, latency_s: 5.0e-6}
      ethernet: {bytes_per_s: 1.25e+9, latency_s: 5.0e-5, ranks_per_link: 2}
    axes:                                     # innermost first
      - {name: tile, size: 2, link: pcie}
      - {name: node, size: 2, link: ethernet}

Instead of `axes` the machine can be listed as boxes of ranks, each joined by a link; each link is
then an axis of that name:

    boxes:
      - {link: pcie, ranks: [0, 1]}
      - {link: pcie, ranks: [2, 3]}
      - {link: ethernet, ranks: 0-3}

Optional per link: `both_ways_bytes_per_s` (twice one way), `ranks_per_link` (1),
`unaligned_from_bytes` (never). Optional beside `axes`: `measured`, a list of
`{axes: [tile], points: [[bytes per rank, seconds], ...]}`, which `cocodiff topology auto --save`
writes; along no axis it is the time of the copies between two phases. With `in_flight: 4` it is the
time that each of four exchanges at once takes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Axis, Link, Topology
from cocodiff_compile.topology.measured_phase import MeasuredPhase
from cocodiff_compile.topology.rank_graph import Box, fold, graph_of_boxes

_LINK_FIELDS = (
    "bytes_per_s",
    "both_ways_bytes_per_s",
    "latency_s",
    "ranks_per_link",
    "unaligned_from_bytes",
)


def load_topology(path: Path) -> Topology:
    """The topology in a file; a `UserError` names the file, the field and what is allowed."""
    try:
        return parse_topology(_read(path))
    except UserError as error:
        raise UserError(f"topology file {path}: {error}") from None


def parse_topology(data: object) -> Topology:
    """The topology that plain data describe."""
    form = "boxes" if isinstance(data, Mapping) and "boxes" in data else "axes"
    needed = ("name", "copy_bytes_per_s", "links", form)
    fields = _mapping("the file", data, needed, optional=("measured",) if form == "axes" else ())
    named = _mapping("links", fields["links"])
    links = {str(name): _link(str(name), value) for name, value in named.items()}
    copy_bytes_per_s = _positive("copy_bytes_per_s", fields["copy_bytes_per_s"])
    name = str(fields["name"])
    if form == "boxes":
        boxes = [_box(number, box, links) for number, box in enumerate(_list(fields, "boxes"))]
        _refuse_rank_twice(boxes)
        ranks = sorted({rank for box in boxes for rank in box.ranks})
        return fold(graph_of_boxes(name, copy_bytes_per_s, ranks, boxes))
    axes = tuple(_axis(number, axis, links) for number, axis in enumerate(_list(fields, "axes")))
    _refuse_name_twice(axes)
    measured = tuple(map(_measured, _list({"measured": [], **fields}, "measured", 0)))
    return Topology(name, axes, copy_bytes_per_s, measured)


def topology_data(topology: Topology) -> dict[str, Any]:
    """Plain data that `parse_topology` turns back into an equal topology, through JSON as well."""
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


def _read(path: Path) -> object:
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from None
    try:
        return json.loads(text) if path.suffix == ".json" else _load_yaml(text)
    except ValueError as error:
        raise UserError(f"cannot be parsed: {error}") from None


def _load_yaml(text: str) -> object:
    try:
        import yaml  # noqa: PLC0415  (optional: JSON needs nothing)
    except ImportError:
        raise UserError("YAML needs `pip install pyyaml`; JSON does not") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _mapping(
    what: str, value: object, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{what} is {value!r}; allowed: a mapping with text keys")
    missing = [name for name in required if name not in value]
    unknown = [name for name in value if required and name not in (*required, *optional)]
    if missing or unknown:
        more = f"; optional: {', '.join(optional)}" if optional else ""
        raise UserError(
            f"{what} has the keys {', '.join(map(str, value))}; needed: {', '.join(required)}{more}"
        )
    return value


def _list(fields: Mapping[str, Any], key: str, at_least: int = 1) -> list[object]:
    value = fields[key]
    if not isinstance(value, list) or len(value) < at_least:
        order = ", innermost first" if key == "axes" else ""
        raise UserError(f"{key} is {value!r}; allowed: a list of {key}{order}")
    return value


def _link(name: str, value: object) -> Link:
    fields = _mapping(f"link {name!r}", value)
    unknown = [key for key in fields if key not in _LINK_FIELDS]
    if unknown or "bytes_per_s" not in fields or "latency_s" not in fields:
        raise UserError(
            f"link {name!r} has the keys {', '.join(map(str, fields))}; needed: bytes_per_s, "
            f"latency_s; allowed: {', '.join(_LINK_FIELDS)}"
        )
    numbers = {key: _positive(f"{key} of link {name!r}", fields[key]) for key in fields}
    numbers.setdefault("both_ways_bytes_per_s", 2 * numbers["bytes_per_s"])
    return Link(name, **numbers)


def _axis(number: int, value: object, links: Mapping[str, Link]) -> Axis:
    fields = _mapping(f"axis {number}", value, ("name", "size", "link"))
    size = fields["size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise UserError(f"size of axis {number} is {size!r}; allowed: a whole number from 2")
    return Axis(str(fields["name"]), size, _known_link(f"axis {number}", fields["link"], links))


def _refuse_name_twice(axes: tuple[Axis, ...]) -> None:
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise UserError(f"axes are named {', '.join(names)}; each name once")


def _box(number: int, value: object, links: Mapping[str, Link]) -> Box:
    fields = _mapping(f"box {number}", value, ("link", "ranks"))
    link = _known_link(f"box {number}", fields["link"], links)
    ranks = _rank_list(f"ranks of box {number}", fields["ranks"])
    return Box(link.name, link, ranks)


def _rank_list(what: str, value: object) -> tuple[int, ...]:
    """`[0, 1, 2]` or `0-2`."""
    span = re.fullmatch(r"(\d+)-(\d+)", value) if isinstance(value, str) else None
    ranks = list(range(int(span[1]), int(span[2]) + 1)) if span else value
    if (
        not isinstance(ranks, list)
        or len(ranks) < 2
        or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks)
    ):
        raise UserError(f"{what} is {value!r}; allowed: two ranks or more, as [0, 1, 2] or 0-2")
    return tuple(sorted(ranks))


def _refuse_rank_twice(boxes: list[Box]) -> None:
    """Two boxes of one link that share a rank would silently be one box."""
    times = Counter((box.link.name, rank) for box in boxes for rank in box.ranks)
    for (link, rank), count in times.items():
        if count > 1:
            raise UserError(
                f"rank {rank} is listed {count} times in the boxes of link {link!r}; allowed: once"
            )


def _measured(value: object) -> MeasuredPhase:
    fields = _mapping("an entry of measured", value, ("axes", "points"), ("in_flight",))
    try:
        points = tuple((float(size), float(seconds)) for size, seconds in fields["points"])
    except (TypeError, ValueError):
        raise UserError(
            f"points of measured are {fields['points']!r}; allowed: [[bytes, seconds], ...]"
        ) from None
    in_flight = fields.get("in_flight", 1)
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise UserError(f"in_flight of measured is {in_flight!r}; allowed: a whole number from 1")
    return MeasuredPhase(tuple(map(str, _list(fields, "axes", 0))), points, in_flight)


def _known_link(what: str, name: object, links: Mapping[str, Link]) -> Link:
    if not isinstance(name, str) or name not in links:
        raise UserError(f"link of {what} is {name!r}; defined links: {', '.join(links)}")
    return links[name]


def _positive(what: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < float("inf")
    ):
        raise UserError(f"{what} is {value!r}; allowed: a number above 0")
    return float(value)
