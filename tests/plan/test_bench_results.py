# SPDX-License-Identifier: Apache-2.0
"""Figures, tables, comparisons and pictures from samples."""

from pathlib import Path
from typing import Any

import pytest

from cocodiff_compile.lab.bench.cases import WORKLOADS, Case, Grid
from cocodiff_compile.lab.bench.page import write_bench_page
from cocodiff_compile.lab.bench.plot import plot_report
from cocodiff_compile.lab.bench.results import Point, Report, VariantResult
from cocodiff_compile.lab.bench.table import compare_reports, format_report

CASE = Case(WORKLOADS["flux"], Grid(2, 1), ("inductor", "overlap", "cache-dit", "cocodiff"), (50,))


def _variant(name: str, kind: str, samples: list[float], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "title": name.upper(),
        "kind": kind,
        "reason": "",
        "notes": [],
        "difference": 1e-6,
        "compile_s": 1.0,
        "samples_s": samples,
        "compute_s": [0.4, 0.28, 0.3],
        "counted": {"payload_bytes": 10_100_000, "packets": 7000},
        "accounted_bytes": 10_000_000,
        "accounted_messages": 24,
        **more,
    }


def _data(**more: Any) -> dict[str, Any]:
    variants = [
        _variant("inductor", "stock", [1.0, 1.2, 0.95, 1.0]),
        _variant("overlap", "rival", [0.9, 0.95, 0.85, 0.9]),
        _variant("cache-dit", "rival", [0.8, 0.85, 0.75, 0.8]),
        _variant("cocodiff", "ours", [0.5, 0.6, 0.475, 0.5]),
    ]
    return {
        "share": 50,
        "rate_mbit": 200.0,
        "streams_bytes_per_s": [20_000_000.0, 25_000_000.0],
        "base": "inductor",
        "flat_bytes": 10_000_000,
        "flat_messages": 24,
        "load_average": [1.0, 1.0],
        "variants": variants,
        **more,
    }


def _report(*points: dict[str, Any], **result: Any) -> Report:
    machine = {"cores": 2, "processor": "test", "torch": "2.13", "load average": 0.5}
    results = [{"case": CASE.to_json(), "ulysses": "diffusers", "points": list(points), **result}]
    return Report({"schema": 1, "machine": machine, "results": results})


def test_the_limit_is_the_longer_of_computation_and_wire() -> None:
    point = Point(CASE, _data())
    assert point.compute_s == 0.28
    assert point.wire_s == pytest.approx(0.4)
    assert point.limit_s == pytest.approx(0.4)
    slow = _data()
    slow["variants"][0]["compute_s"] = [0.7]
    assert Point(CASE, slow).limit_s == 0.7
    assert point.share == pytest.approx(0.7)


def test_figures_of_a_way() -> None:
    point = Point(CASE, _data())
    ours = point.variants[-1]
    assert point.over_stock(ours) == pytest.approx(2.0)
    assert point.best_rival is not None and point.best_rival.name == "cache-dit"
    assert point.over_best_rival(ours) == pytest.approx(1.6)
    assert point.over_limit(ours) == pytest.approx(1.25)
    assert point.exposed(ours) == pytest.approx(0.5)
    own = _variant("cocodiff", "ours", [0.5], compute_s=[0.4])
    assert point.exposed(VariantResult(own)) == pytest.approx(0.25)
    assert ours.counted_to_accounted == pytest.approx(1.01)


def test_where_nothing_crosses_nothing_is_exposed() -> None:
    point = Point(CASE, _data(streams_bytes_per_s=[], flat_bytes=0))
    assert point.wire_s == 0
    assert point.limit_s == point.compute_s
    assert point.exposed(point.variants[0]) is None


@pytest.mark.parametrize("samples", [[0.5, 0.8, 0.5, 0.8], [0.5, 0.5, 0.8, 0.8]])
def test_noise_is_the_distance_of_two_halves_of_the_rounds(samples: list[float]) -> None:
    stock = _variant("inductor", "stock", [1.0, 1.0, 1.0, 1.0])
    noisy = _data(variants=[stock, _variant("cocodiff", "ours", samples)])
    point = Point(CASE, noisy)
    assert point.noise(point.variants[1]) == pytest.approx(0.6)
    text = format_report(_report(noisy))
    assert "TOO NOISY: COCODIFF: speedups from two halves of the rounds differ by 60%" in text
    assert "by up to 60%; 1 of 1 points have warnings" in text


def test_what_is_quiet_and_adds_up_is_not_doubted() -> None:
    data = _data()
    for variant in data["variants"]:
        variant["samples_s"] = [variant["samples_s"][0]] * 4
    assert Point(CASE, data).warnings == ()
    assert "0 of 1 points have warnings" in format_report(_report(data))


def test_bytes_that_do_not_add_up_and_steps_below_the_limit_are_doubted() -> None:
    data = _data()
    data["variants"][3] = _variant(
        "cocodiff", "ours", [0.39], counted={"payload_bytes": 10_600_000, "packets": 1}
    )
    warnings = Point(CASE, data).warnings
    assert any(
        doubt.startswith("COUNTED: COCODIFF: the interface sent +6.0%") for doubt in warnings
    )
    assert any(doubt.startswith("LIMIT: COCODIFF is faster than the limit") for doubt in warnings)


def test_it_is_said_whose_ulysses_stands_in_for_diffusers() -> None:
    assert "Ulysses of shard-tokens" in format_report(
        _report(_data(), ulysses="shard-tokens (diffusers has no plan)")
    )


def test_a_variant_that_cannot_run_stays_in_the_table_with_its_reason() -> None:
    data = _data()
    data["variants"][2] = _variant("cache-dit", "rival", [], reason="not installed", counted=None)
    point = Point(CASE, data)
    assert point.best_rival is not None and point.best_rival.name == "overlap"
    text = format_report(_report(data))
    (row,) = [line for line in text.splitlines() if line.startswith("CACHE-DIT")]
    assert "cannot run" in row
    assert "CACHE-DIT: not installed" in text


def test_a_case_that_failed_stays_in_the_report() -> None:
    report = _report(failure="rank 1: no memory")
    assert report.failures == (("flux fp32 2x1", "rank 1: no memory"),)
    assert "flux fp32 2x1: not measured: rank 1: no memory" in format_report(report)


def test_every_figure_is_in_the_table() -> None:
    (row,) = [line for line in format_report(_report(_data())).splitlines() if "COCODIFF" in line]
    assert row.split() == [
        *("COCODIFF", "500", "475", "2.00x", "1.60x", "1.25", "50%"),
        *("10.0", "+1.0%", "24", "7000", "1e-06"),
    ]


def test_comparing_says_what_moved_beyond_noise() -> None:
    slower = _data()
    slower["variants"][3] = _variant("cocodiff", "ours", [0.7, 0.7, 0.7, 0.7])
    text = compare_reports(_report(_data()), _report(slower))
    (row,) = [line for line in text.splitlines() if "COCODIFF" in line]
    assert "2.00x" in row and "1.43x" in row and row.endswith("SLOWER")
    assert "1 of 4 speedups over stock changed" in text
    same = compare_reports(_report(_data()), _report(_data()))
    assert "0 of 4 speedups" in same
    rates = [_data(share=None, rate_mbit=rate) for rate in (100.0, 200.0)]
    rates[0]["variants"][3] = _variant("cocodiff", "ours", [0.7, 0.7, 0.7, 0.7])
    assert "0 of 8 speedups" in compare_reports(_report(*rates), _report(*rates))
    other = Report({**_report(_data()).data, "results": []})
    assert compare_reports(other, _report(_data())) == "the two runs have no point in common"


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    paths = plot_report(_report(_data(), _data(share=75)), tmp_path)
    assert [path.name for path in paths] == ["steps.png", "exposed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert plot_report(_report(failure="all"), tmp_path) == []


def test_a_report_is_a_page_with_a_section_per_point(tmp_path: Path) -> None:
    noisy, broken = _data(share=75), _data(share=90)
    noisy["variants"][3]["samples_s"] = [0.5, 2.0, 0.5, 2.0]
    broken["variants"][1] |= {"reason": "needs <two> cores", "samples_s": []}
    report = _report(_data(), noisy, broken, failure="links were lost")
    write_bench_page(report, plot_report(report, tmp_path), tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert page.count('<details class="section" id=') == 5, "summary, pictures, three points"
    assert "links were lost" in page
    assert "TOO NOISY" in page
    assert "needs &lt;two&gt; cores" in page
    assert ">2.00x<" in page, "over stock"
    assert page.count("<circle") == 16 + 16 + 12, "a dot per sample of what ran"
