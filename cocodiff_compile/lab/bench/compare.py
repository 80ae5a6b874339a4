"""Compares two runs: lists the speedups that changed by more than the noise of either run."""

from __future__ import annotations

from cocodiff_compile.lab.bench.results import NOISE_LIMIT, Point, Report, VariantResult
from cocodiff_compile.report.describe import format_table

_HEADERS = ("point", "variant", "step ms", "", "over stock", "", "change", "noise", "")


def compare_reports(old: Report, new: Report) -> str:
    """Returns a table of speedups over stock. They are taken within each run, since two runs may
    see two machines.
    """
    rows = []
    for before, after in _common_points(old, new):
        known = {variant.name: variant for variant in before.ready}
        rows += [
            _row(before, known[variant.name], after, variant)
            for variant in after.ready
            if variant.name in known
        ]
    if not rows:
        return "the two runs have no point in common"
    moved = sum(row[-1] != "" for row in rows)
    return "\n".join(
        [
            format_table(_HEADERS, rows),
            "",
            f"{moved} of {len(rows)} speedups over stock changed by more than "
            f"{NOISE_LIMIT:.0%} and by more than the noise of both runs",
        ]
    )


def _common_points(old: Report, new: Report) -> list[tuple[Point, Point]]:
    known = {_key(point): point for point in old.points}
    return [(known[_key(point)], point) for point in new.points if _key(point) in known]


def _key(point: Point) -> tuple[object, ...]:
    share = point.data["share"]
    return point.case.workload, point.case.grid, share, share or point.data["rate_mbit"]


def _row(before: Point, old: VariantResult, after: Point, new: VariantResult) -> list[str]:
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
