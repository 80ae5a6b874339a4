"""A topology from a JSON or YAML file, checked field by field.

    name: two-nodes
    copy_bytes_per_s: 1.0e+10
    links:
      pcie:     {bytes_per_s: 2.0e+10, latency_s: 5.0e-6}
      ethernet: {bytes_per_s: 1.25e+9, latency_s: 5.0e-5, ranks_per_link: 2}
    axes:                                     # innermost first
      - {name: tile, size: 2, link: pcie}
      - {name: node, size: 2, link: ethernet}

Optional per link: `both_ways_bytes_per_s` (twice one way), `ranks_per_link` (1),
`unaligned_from_bytes` (never).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.axes import Axis, Link, Topology

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
    fields = _mapping("the file", data, ("name", "copy_bytes_per_s", "links", "axes"))
    named = _mapping("links", fields["links"])
    links = {name: _link(name, value) for name, value in named.items()}
    if not isinstance(fields["axes"], list) or not fields["axes"]:
        raise UserError(f"axes is {fields['axes']!r}; allowed: a list of axes, innermost first")
    axes = tuple(_axis(number, value, links) for number, value in enumerate(fields["axes"]))
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise UserError(f"axes are named {', '.join(names)}; each name once")
    return Topology(
        str(fields["name"]), axes, _positive("copy_bytes_per_s", fields["copy_bytes_per_s"])
    )


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


def _mapping(what: str, value: object, required: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{what} is {value!r}; allowed: a mapping with text keys")
    missing = [name for name in required if name not in value]
    unknown = [str(name) for name in value if required and name not in required]
    if missing or unknown:
        raise UserError(
            f"{what} has the keys {', '.join(map(str, value))}; needed: {', '.join(required)}"
        )
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
    if fields["link"] not in links:
        known = ", ".join(links)
        raise UserError(f"link of axis {number} is {fields['link']!r}; defined links: {known}")
    return Axis(str(fields["name"]), size, links[fields["link"]])


def _positive(what: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < float("inf")
    ):
        raise UserError(f"{what} is {value!r}; allowed: a number above 0")
    return float(value)
