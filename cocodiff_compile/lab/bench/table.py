"""Formats a run as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocodiff_compile.lab.bench.results import Point, Report, VariantResult
from cocodiff_compile.report.describe import format_table

_HEADERS = (
    "variant",
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
    """Returns a table per point, the cases that could not be measured, and how far figures can be
    trusted.
    """
    parts = [format_point(point) for point in report.points]
    parts += [f"{title}: not measured: {failure}" for title, failure in report.failures]
    parts += [
        f"{title}: the variants called diffusers run the Ulysses of {whose}"
        for title, whose in report.ulysses.items()
        if whose != "diffusers"
    ]
    parts.append(_verdict(report))
    parts.append(format_machine(report.data["machine"]))
    return "\n\n".join(parts)


def format_point(point: Point) -> str:
    rows = [_row(point, variant) for variant in point.variants]
    reasons = [
        f"  {variant.title}: {variant.reason}" for variant in point.variants if variant.reason
    ]
    notes = [
        f"  {variant.title}: {note}" for variant in point.ready for note in variant.data["notes"]
    ]
    return "\n".join(
        [_head(point), format_table(_HEADERS, rows), *reasons, *notes, *point.warnings]
    )


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


def _row(point: Point, variant: VariantResult) -> list[str]:
    if variant.reason:
        return [variant.title, "cannot run", *[""] * (len(_HEADERS) - 2)]
    counted = variant.counted_to_accounted
    return [
        variant.title,
        f"{variant.step_s * 1e3:.0f}",
        f"{variant.least_s * 1e3:.0f}",
        _times(point.over_stock(variant)),
        _times(point.over_best_rival(variant)),
        f"{point.over_limit(variant):.2f}",
        _percent(point.exposed(variant)),
        f"{variant.data['accounted_bytes'] / 1e6:.1f}",
        "not read" if counted is None else f"{counted - 1:+.1%}",
        str(variant.data["accounted_messages"]),
        str(variant.data["counted"]["packets"]) if variant.data["counted"] else "",
        "" if variant.data["difference"] is None else f"{variant.data['difference']:.0e}",
    ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _verdict(report: Report) -> str:
    noises = [point.noise(variant) for point in report.points for variant in point.ready]
    most = max(noises, default=0.0)
    doubtful = sum(bool(point.warnings) for point in report.points)
    return (
        f"noise: speedups from two halves of the rounds differ by up to {most:.0%}; "
        f"{doubtful} of {len(report.points)} points have warnings"
    )


def format_machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())
