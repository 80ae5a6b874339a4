"""A run as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocodiff_compile.bench.results import NOISE_LIMIT, Point, Report, WayResult
from cocodiff_compile.report.describe import format_table

_HEADERS = (
    "way",
    "step ms",
    "median",
    "over stock",
    "over best rival",
    "step / limit",
    "exposed",
    "MB sent",
    "counted",
    "messages",
    "off by",
)


def format_report(report: Report) -> str:
    """A table per point, what could not be measured, and how far the figures can be trusted."""
    parts = [format_point(point) for point in report.points]
    parts += [f"{title}: not measured: {failure}" for title, failure in report.failures]
    parts.append(_verdict(report))
    parts.append(format_machine(report.data["machine"]))
    return "\n\n".join(parts)


def format_point(point: Point) -> str:
    data = point.data
    rate = data["rate_mbit"]
    link = "links as they are" if rate is None else f"emulated links of {rate:.0f} Mbit/s"
    stream = data["stream_bytes_per_s"]
    measured = f", a stream gets {stream / 1e6:.1f} MB/s" if stream else ""
    head = (
        f"{point.title}: {link}{measured}\n"
        f"limit {point.limit_s * 1e3:.0f} ms = max(compute {point.compute_s * 1e3:.0f}, "
        f"wire {point.wire_s * 1e3:.0f}: {data['flat_bytes'] / 1e6:.1f} MB per node)"
    )
    rows = [_row(point, way) for way in point.ways]
    reasons = [f"  {way.title}: {way.reason}" for way in point.ways if way.reason]
    return "\n".join([head, format_table(_HEADERS, rows), *reasons])


def _row(point: Point, way: WayResult) -> list[str]:
    if way.reason:
        return [way.title, "cannot run", *[""] * (len(_HEADERS) - 2)]
    counted = way.counted_to_accounted
    return [
        way.title,
        f"{way.step_s * 1e3:.0f}",
        f"{way.median_s * 1e3:.0f}",
        _times(point.over_stock(way)),
        _times(point.over_best_rival(way)),
        f"{point.over_limit(way):.2f}",
        _percent(point.exposed(way)),
        f"{way.data['accounted_bytes'] / 1e6:.1f}",
        "not read" if counted is None else f"{counted - 1:+.1%}",
        str(way.data["accounted_messages"]),
        "" if way.data["difference"] is None else f"{way.data['difference']:.0e}",
    ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _verdict(report: Report) -> str:
    noise = report.noise
    if noise > NOISE_LIMIT:
        return (
            f"TOO NOISY: speedups from the odd and the even rounds differ by up to {noise:.0%}, "
            f"more than {NOISE_LIMIT:.0%}; run it again on a quieter machine"
        )
    return f"noise: speedups from the odd and the even rounds differ by up to {noise:.0%}"


def format_machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())
