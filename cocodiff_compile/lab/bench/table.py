"""A run as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocodiff_compile.lab.bench.results import Point, Report, WayResult
from cocodiff_compile.report.describe import format_table

_HEADERS = (
    "way",
    "step ms",
    "least",
    "over stock",
    "over best rival",
    "step / limit",
    "exposed",
    "MB sent",
    "counted",
    "messages",
    "packets",
    "off by",
)


def format_report(report: Report) -> str:
    """A table per point, what could not be measured, and how far the figures can be trusted."""
    parts = [format_point(point) for point in report.points]
    parts += [f"{title}: not measured: {failure}" for title, failure in report.failures]
    parts += [
        f"{title}: the Ulysses of the ways called diffusers is that of {whose}"
        for title, whose in report.ulysses.items()
        if whose != "diffusers"
    ]
    parts.append(_verdict(report))
    parts.append(format_machine(report.data["machine"]))
    return "\n\n".join(parts)


def format_point(point: Point) -> str:
    rows = [_row(point, way) for way in point.ways]
    reasons = [f"  {way.title}: {way.reason}" for way in point.ways if way.reason]
    notes = [f"  {way.title}: {note}" for way in point.ready for note in way.data["notes"]]
    return "\n".join([_head(point), format_table(_HEADERS, rows), *reasons, *notes, *point.doubts])


def _head(point: Point) -> str:
    rate, stream, share = point.data["rate_mbit"], point.stream_bytes_per_s, point.share
    link = "links as they are" if rate is None else f"emulated links of {rate:.0f} Mbit/s"
    measured = f", a stream gets {stream / 1e6:.1f} MB/s" if stream else ""
    real = "" if share is None else f"; communication is {share:.0%} of a stock step"
    return (
        f"{point.title}: {link}{measured}{real}\n"
        f"limit {point.limit_s * 1e3:.0f} ms = max(compute {point.compute_s * 1e3:.0f}, "
        f"wire {point.wire_s * 1e3:.0f}: {point.data['flat_bytes'] / 1e6:.1f} MB per node)"
    )


def _row(point: Point, way: WayResult) -> list[str]:
    if way.reason:
        return [way.title, "cannot run", *[""] * (len(_HEADERS) - 2)]
    counted = way.counted_to_accounted
    return [
        way.title,
        f"{way.step_s * 1e3:.0f}",
        f"{way.least_s * 1e3:.0f}",
        _times(point.over_stock(way)),
        _times(point.over_best_rival(way)),
        f"{point.over_limit(way):.2f}",
        _percent(point.exposed(way)),
        f"{way.data['accounted_bytes'] / 1e6:.1f}",
        "not read" if counted is None else f"{counted - 1:+.1%}",
        str(way.data["accounted_messages"]),
        str(way.data["counted"]["packets"]) if way.data["counted"] else "",
        "" if way.data["difference"] is None else f"{way.data['difference']:.0e}",
    ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _verdict(report: Report) -> str:
    noises = [point.noise(way) for point in report.points for way in point.ready]
    most = max(noises, default=0.0)
    doubtful = sum(bool(point.doubts) for point in report.points)
    return (
        f"noise: speedups from two halves of the rounds differ by up to {most:.0%}; "
        f"{doubtful} of {len(report.points)} points are in doubt"
    )


def format_machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())
