# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of decisions, so that a later start needs no probing and no search.

A file holds the decision for each graph, and with V-Major for each kind of denoising step. It is
good for the versions and options it was made with. A graph that it does not hold, another
resolution say, is decided when it is compiled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cocodiff_compile.decide.decision import Decision, ExchangePhases
from cocodiff_compile.errors import UserError
from cocodiff_compile.given_values import has_text_keys, shown, shown_keys, whole_number
from cocodiff_compile.topology.files import parse_topology, topology_data
from cocodiff_compile.topology.read_plain_data import read_plain_data, write_atomically


@dataclass(frozen=True)
class GraphDecision:
    """The decision for one kind of step of one graph; `graph` is its fingerprint."""

    graph: str
    kind: str
    decision: Decision


@dataclass(frozen=True)
class GivenDecisions:
    """Holds the decisions of a file. Two of them print alike exactly if they hold the same."""

    made_with: Mapping[str, str]
    graphs: tuple[GraphDecision, ...]

    def kinds_of(self, graph: str) -> dict[str, Decision]:
        """Returns the decisions for a graph, by the kind of step; none if it is not held."""
        return {item.kind: item.decision for item in self.graphs if item.graph == graph}

    def refuse_other(self, made_with: Mapping[str, str]) -> None:
        """Raises a UserError if the decisions were made with other versions or options."""
        for what, value in made_with.items():
            if (before := self.made_with.get(what)) != value:
                raise UserError(
                    f"option 'decision': the file was made with {what} {shown(before)}, and this "
                    f"is {shown(value)}; compile without it and save the decisions again"
                )

    def __repr__(self) -> str:
        text = json.dumps(_file_data(self))
        text = json.dumps(json.loads(text, parse_int=float), sort_keys=True)  # 1 is as good as 1.0
        return f"<decisions {hashlib.sha256(text.encode()).hexdigest()[:16]}>"


def write_decisions(given: GivenDecisions, path: Path) -> None:
    """Writes decisions to a JSON file, whole or not at all. Raises a UserError if it cannot."""
    if path.suffix != ".json":
        raise UserError(f"decision file {shown(str(path))[1:-1]}: its name must end in .json")
    try:
        write_atomically(path, json.dumps(_file_data(given)) + "\n")
    except OSError as error:
        raise UserError(f"decision file {shown(str(path))[1:-1]}: {error.strerror}") from None


def load_decisions(path: Path) -> GivenDecisions:
    """Reads decisions from a JSON file; a UserError names the file and the field."""
    try:
        return _parse(read_plain_data(path))
    except UserError as error:
        raise UserError(f"decision file {shown(str(path))[1:-1]}: {error}") from None


def _file_data(given: GivenDecisions) -> dict[str, Any]:
    return {
        "made_with": dict(given.made_with),
        "graphs": [
            {"graph": item.graph, "kind": item.kind, "decision": _decision_data(item.decision)}
            for item in given.graphs
        ],
    }


def _decision_data(decision: Decision) -> dict[str, Any]:
    data = {field.name: getattr(decision, field.name) for field in fields(decision)}
    data["topologies"] = [topology_data(item) for item in decision.topologies]
    data["phases"] = [
        {"group": item.group, "size_bytes": item.size_bytes, "phases": item.phases}
        for item in decision.phases
    ]
    return data


def _parse(data: object) -> GivenDecisions:
    held = _mapping("the file", data, ("made_with", "graphs"))
    made_with = held["made_with"]
    if not has_text_keys(made_with) or not all(isinstance(v, str) for v in made_with.values()):
        raise UserError(f"made_with is {shown(made_with)}; allowed: a mapping of text to text")
    graphs = tuple(_graph(item) for item in _list("graphs", held["graphs"]))
    return GivenDecisions(dict(made_with), graphs)


def _graph(data: object) -> GraphDecision:
    held = _mapping("an entry of graphs", data, ("graph", "kind", "decision"))
    return GraphDecision(
        _text("graph", held["graph"]), _text("kind", held["kind"]), _decision(held["decision"])
    )


def _decision(data: object) -> Decision:
    held = _mapping("a decision", data, tuple(field.name for field in fields(Decision)))
    unfused, order = held["unfused_projections"], held["order"]
    if not isinstance(unfused, bool):
        raise UserError(f"unfused_projections is {shown(unfused)}; allowed: true, false")
    decision = Decision(
        unfused_projections=unfused,
        head_chunks=_numbers("head_chunks", held["head_chunks"], 1),
        token_chunks=_number("token_chunks", held["token_chunks"], 1),
        token_chunked=_numbers("token_chunked", held["token_chunked"]),
        uncoded=tuple(_text("uncoded", item) for item in _list("uncoded", held["uncoded"])),
        phases=tuple(_phases(item) for item in _list("phases", held["phases"])),
        topologies=tuple(parse_topology(item) for item in _list("topologies", held["topologies"])),
        order=None if order is None else _numbers("order", order),
    )
    if order is not None and sorted(decision.order or ()) != list(range(len(order))):
        raise UserError("order is no permutation of the numbers from 0 on")
    return decision


def _phases(data: object) -> ExchangePhases:
    held = _mapping("an entry of phases", data, ("group", "size_bytes", "phases"))
    phases = tuple(
        tuple(_text("an axis of phases", axis) for axis in _list("a phase", phase))
        for phase in _list("phases", held["phases"])
    )
    size_bytes = _number("size_bytes", held["size_bytes"])
    return ExchangePhases(_number("group", held["group"]), size_bytes, phases)


def _mapping(what: str, value: object, keys: Sequence[str]) -> Mapping[str, Any]:
    if not has_text_keys(value) or set(value) != set(keys):
        given = shown_keys(value) if has_text_keys(value) else shown(value)
        raise UserError(f"{what} has {given}; needed: {', '.join(keys)}")
    return value


def _list(what: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise UserError(f"{what} is {shown(value)}; allowed: a list")
    return value


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} is {shown(value)}; allowed: text")
    return value


def _number(what: str, value: object, least: int = 0) -> int:
    number = whole_number(value)
    if number is None or number < least:
        raise UserError(f"{what} is {shown(value)}; allowed: a whole number from {least} on")
    return number


def _numbers(what: str, value: object, least: int = 0) -> tuple[int, ...]:
    return tuple(_number(what, item, least) for item in _list(what, value))
