# SPDX-License-Identifier: Apache-2.0
"""Formats a run, or the comparison of two, as text."""

from __future__ import annotations

from cocodiff_compile.lab.bench.results import NOISE_LIMIT, Point, Report, VariantResult
from cocodiff_compile.report.tables import format_rows, format_table

_COMPARED = ("point", "variant", "step ms", "", "over stock", "", "change", "noise", "")


def format_report(report: Report) -> str:
    """Returns a table per point, the failures, and how far figures can be trusted."""
    parts = [format_point(point) for point in report.points]
    parts += [f"{title}: not measured: {failure}" for title, failure in report.failures]
    parts += [
        f"{title}: the variants called diffusers run the Ulysses of {whose}"
        for title, whose in report.ulysses.items()
        if whose != "diffusers"
    ]
    machine = ", ".join(f"{key} {value}" for key, value in report.data["machine"].items())
    return "\n\n".join([*parts, _verdict(report), machine])


def format_point(point: Point) -> str:
    rows = [row_of_variant(point, variant) for variant in point.variants]
    reasons = [
        f"  {variant.title}: {variant.reason}" for variant in point.variants if variant.reason
    ]
    notes = [
        f"  {variant.title}: {note}" for variant in point.ready for note in variant.data["notes"]
    ]
    return "\n".join([head_of_point(point), format_rows(rows), *reasons, *notes, *point.warnings])


def head_of_point(point: Point) -> str:
    """Returns two lines: the links of a point, and the limit on them."""
    rate, stream, share = point.data["rate_mbit"], point.stream_bytes_per_s, point.share
    link = "links as they are" if rate is None else f"emulated links of {rate:.0f} Mbit/s"
    measured = f", a stream gets {stream / 1e6:.1f} MB/s" if stream else ""
    real = "" if share is None else f"; communication is {share:.0%} of a stock step"
    return (
        f"{point.title}: {link}{measured}{real}\n"
        f"limit {point.limit_s * 1e3:.0f} ms = max(compute {point.compute_s * 1e3:.0f}, "
        f"wire {point.wire_s * 1e3:.0f}: {point.data['flat_bytes'] / 1e6:.1f} MB per node)"
    )


def row_of_variant(point: Point, variant: VariantResult) -> dict[str, object]:
    """Returns the figures of a variant by the names of their columns."""
    if variant.reason:
        return {"variant": variant.title, "step ms": "cannot run"}
    data, counted = variant.data, variant.counted_to_accounted
    return {
        "variant": variant.title,
        "step ms": f"{variant.step_s * 1e3:.0f}",
        "least": f"{variant.least_s * 1e3:.0f}",
        "over stock": _shown(point.over_stock(variant), ".2f", "x"),
        "over best rival": _shown(point.over_best_rival(variant), ".2f", "x"),
        "step / limit": f"{point.over_limit(variant):.2f}",
        "exposed": _shown(point.exposed(variant), ".0%"),
        "MB sent": f"{data['accounted_bytes'] / 1e6:.1f}",
        "counted": "not read" if counted is None else f"{counted - 1:+.1%}",
        "messages": data["accounted_messages"],
        "packets": data["counted"]["packets"] if data["counted"] else "",
        "off by": _shown(data["difference"], ".0e"),
    }


def _shown(value: float | None, how: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{how}}{unit}"


def _verdict(report: Report) -> str:
    noises = [point.noise(variant) for point in report.points for variant in point.ready]
    most = max(noises, default=0.0)
    doubtful = sum(bool(point.warnings) for point in report.points)
    return (
        f"noise: speedups from two halves of the rounds differ by up to {most:.0%}; "
        f"{doubtful} of {len(report.points)} points have warnings"
    )


def compare_reports(old: Report, new: Report) -> str:
    """Returns a table of speedups over stock of the same run, as two runs may see two machines."""
    known = {
        (_key(point), each.name): (point, each) for point in old.points for each in point.ready
    }
    rows = [
        _compared(*known[_key(point), each.name], point, each)
        for point in new.points
        for each in point.ready
        if (_key(point), each.name) in known
    ]
    if not rows:
        return "the two runs have no point in common"
    moved = sum(row[-1] != "" for row in rows)
    return (
        f"{format_table(_COMPARED, rows)}\n\n{moved} of {len(rows)} speedups over stock changed by "
        f"more than {NOISE_LIMIT:.0%} and by more than the noise of both runs"
    )


def _key(point: Point) -> tuple[object, ...]:
    share = point.data["share"]
    return point.case.workload, point.case.grid, share, share or point.data["rate_mbit"]


def _compared(before: Point, old: VariantResult, after: Point, new: VariantResult) -> list[str]:
    ratios = before.over_stock(old), after.over_stock(new)
    change = ratios[1] / ratios[0] - 1 if ratios[0] and ratios[1] else 0.0
    noise = max(before.noise(old), after.noise(new))
    moved = abs(change) > max(NOISE_LIMIT, noise)
    return [
        after.title,
        new.title,
        f"{old.step_s * 1e3:.0f}",
        f"{new.step_s * 1e3:.0f}",
        *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        f"{change:+.1%}",
        f"{noise:.1%}",
        ("faster" if change > 0 else "SLOWER") if moved else "",
    ]
