# SPDX-License-Identifier: Apache-2.0
"""Shows what V-Major sent in each denoising step and attention, and how much of it was lost, from
what a rank recorded while it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cocodiff_compile.report.page.sections import (
    Cell,
    Column,
    Facts,
    HeatMap,
    Part,
    Section,
    Table,
    Text,
)
from cocodiff_compile.report.tables import format_bytes

_MAX_ROWS, _MAX_STEPS = 200, 200
_SENT_CAPTION = "part of its bytes that each attention sent, step by step: the darker the more"
_LOST_CAPTION = "part of its energy that each attention lost, step by step: the darker the more"


def v_major_section(recorded: Mapping[str, Any] | None) -> Section:
    """Returns what V-Major did in the steps that ran: of `record_steps`; None before any ran."""
    title, lead = (
        "V-Major: bytes and loss",
        ("What this rank sent to others in each denoising step, against sending everything."),
    )
    if not recorded or not recorded["steps"]:
        why = (
            "No denoising step was recorded yet: this page is written again when a "
            "`with cocodiff_compile.denoising(...)` block ends."
        )
        return Section("V-Major", title, (Text(why),), lead)
    return Section("V-Major", title, _parts(recorded), lead)


def _parts(recorded: Mapping[str, Any]) -> list[Part]:
    steps = recorded["steps"]
    sent, full = (sum(step[key] for step in steps) for key in ("sent_bytes", "full_bytes"))
    parts: list[Part] = [
        Facts(
            [
                ("sent", format_bytes(sent), f"of {format_bytes(full)} uncompressed"),
                ("part of the bytes", f"{100 * sent / full:.1f} %" if full else "?", ""),
                ("steps", str(len(steps)), "of all pictures"),
                ("caches", format_bytes(max(step["cache_bytes"] for step in steps)), "at the most"),
            ]
        )
    ]
    last = steps[-_MAX_STEPS:]
    if recorded["layers"]:
        shares = [[_share(recorded, step, place) for step in last] for place in _layers(recorded)]
        parts.append(_map(recorded, shares, _SENT_CAPTION, "sent", "matmul"))
    if any(step["losses"] for step in last):
        losses = [[_loss(step, place) for step in last] for place in _layers(recorded)]
        parts.append(_map(recorded, losses, _LOST_CAPTION, "lost", "bad"))
    else:
        parts.append(
            Text("Loss is measured where the policy needs it: v_major={'policy': 'adaptive'}.")
        )
    return [*parts, _table(last)]


def _layers(recorded: Mapping[str, Any]) -> range:
    return range(min(_MAX_ROWS, len(recorded["layers"])))


def _share(recorded: Mapping[str, Any], step: Mapping[str, Any], place: int) -> float:
    """Returns the part of its bytes that an attention sent in a step, over the calls of it."""
    full = recorded["full_by_layer"][place]
    calls = sum(step["kinds"].values())
    sent = sum(
        count * recorded["sent_by_layer"].get(kind, recorded["full_by_layer"])[place]
        for kind, count in step["kinds"].items()
    )
    return sent / (calls * full) if calls and full else 0.0


def _loss(step: Mapping[str, Any], place: int) -> float | None:
    return float(step["losses"][place]) if place < len(step["losses"]) else None


def _map(
    recorded: Mapping[str, Any],
    values: Sequence[Sequence[float | None]],
    caption: str,
    word: str,
    color: str,
) -> HeatMap:
    rows = [recorded["layers"][place] or str(place) for place in _layers(recorded)]
    columns = [str(step["step"]) for step in recorded["steps"][-_MAX_STEPS:]]
    power = 0.4 if word == "lost" else 1.0
    return HeatMap(rows, columns, values, caption, "step", word, color, power)


def _table(steps: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("step", True), Column("kind of step"), Column("sent", True),
        Column("part of the bytes", True), Column("mean loss", True), Column("caches", True),
    )  # fmt: skip
    rows = []
    for step in steps:
        share = step["sent_bytes"] / step["full_bytes"] if step["full_bytes"] else 0.0
        losses = step["losses"]
        mean = sum(losses) / len(losses) if losses else None
        rows.append(
            (
                Cell(str(step["step"]), step["step"]),
                " / ".join(step["kinds"]),
                Cell(format_bytes(step["sent_bytes"]), step["sent_bytes"]),
                Cell(f"{share * 100:.1f} %", share),
                Cell(f"{mean * 100:.3g} %", mean) if mean is not None else "",
                Cell(format_bytes(step["cache_bytes"]), step["cache_bytes"]),
            )
        )
    return Table(columns, rows, "denoising steps")
