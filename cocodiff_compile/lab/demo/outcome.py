# SPDX-License-Identifier: Apache-2.0
"""Holds what came of a demo, and says it in a table."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isinf
from statistics import mean, median
from typing import Any

import torch

from cocodiff_compile.lab.demo.one_process import OneProcess
from cocodiff_compile.lab.quality.ranks import distances
from cocodiff_compile.lab.quality.settings import EXACT, PASSES
from cocodiff_compile.report.tables import format_bytes, format_rows

LEAST_EXACT_DB, LEAST_LOSSY_DB = 60.0, 30.0
"""How near each picture must be to that of one process. Inductor itself rounds differently."""
TITLES = {EXACT: "stock Inductor", PASSES: "cocodiff, exact"}


@dataclass(frozen=True)
class Row:
    """Sums up one way of drawing."""

    title: str
    step_s: float
    speedup: float | None
    """Over stock Inductor on the same ranks; None for one process."""
    bytes_per_step: float | None
    """What a node sends, as its interface counted it."""
    least_db: float
    mean_db: float
    is_lossy: bool = False


class Outcome:
    """The pictures of one process, and the result of the ranks."""

    def __init__(self, one_process: OneProcess, result: dict[str, Any]) -> None:
        self.one_process = one_process
        self.result = result
        self.rows = [Row("one process, eager", one_process.step_s, None, None, inf, inf)]
        self.rows += [self._row(variant) for variant in result["variants"]]

    @property
    def links(self) -> str:
        rate = self.result["rate_mbit"]
        where = "loopback" if rate is None else f"an emulated link of {rate:.0f} Mbit/s"
        return f"{self.result['ranks']} ranks over {where}"

    @property
    def is_near_enough(self) -> bool:
        """Returns whether every picture is as near to one process as it must be."""
        return all(
            row.least_db >= (LEAST_LOSSY_DB if row.is_lossy else LEAST_EXACT_DB)
            for row in self.rows
        )

    @property
    def keeps_bits(self) -> bool:
        """Returns whether the exact passes give the same bits as stock Inductor."""
        stock, exact, *_ = self.result["variants"]
        return torch.equal(stock["pictures"], exact["pictures"])

    def format(self) -> str:
        """Returns the table."""
        given = self.result["settings"]
        head = (
            f"{given['pictures']} pictures of {given['steps']} steps with guidance, "
            f"{given['batch']} at once; {self.links}"
        )
        bits = "the same bits" if self.keeps_bits else "NOT the same bits"
        verdict = "ok" if self.is_near_enough else "NOT ok: pictures are too far from one process"
        return (
            f"{head}\n{format_rows(self.table)}\n"
            f"exact and stock Inductor: {bits}\nverdict: {verdict}"
        )

    @property
    def table(self) -> list[dict[str, object]]:
        """Returns the rows as cells."""
        return [
            {
                "": row.title,
                "ms per step": f"{row.step_s * 1e3:.0f}",
                "over stock": "" if row.speedup is None else f"{row.speedup:.2f}x",
                "a node sends per step": (
                    "" if row.bytes_per_step is None else format_bytes(round(row.bytes_per_step))
                ),
                "PSNR to one process, mean": _decibels(row.mean_db),
                "worst picture": _decibels(row.least_db),
            }
            for row in self.rows
        ]

    def _row(self, variant: dict[str, Any]) -> Row:
        steps = self.result["settings"]["steps"]
        stock_s = median(self.result["variants"][0]["seconds"])
        seconds = median(variant["seconds"])
        counted = variant["counted_bytes"]
        psnrs = [item.psnr_db for item in distances(variant["pictures"], self.one_process.pictures)]
        return Row(
            f"{self.result['ranks']} ranks, {title_of(variant['name'])}",
            seconds / steps,
            stock_s / seconds,
            median(counted) / steps if counted else None,
            min(psnrs),
            mean(psnrs),
            is_lossy=variant["name"] not in TITLES,
        )


def title_of(name: str) -> str:
    """Returns the title of a variant by its name."""
    return TITLES.get(name, f"cocodiff, V-Major ({name})")


def _decibels(value: float) -> str:
    return "same bits" if isinf(value) else f"{value:.1f} dB"
