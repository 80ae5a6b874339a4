# SPDX-License-Identifier: Apache-2.0
"""Computes figures from samples: step times, the physical limit, exposed communication, noise.

    step     the median of all rounds, which repeats better here than the minimum
    compute  a variant's code with local copies instead of exchanges, the median too
    wire     bytes the busiest node must send to others / the rate of a plain stream
    limit    max(least compute of stock, wire): no order of the same work on these links is faster
    exposed  (step - its compute) / wire: the part of the wire time that computation does not hide

The rate is the best of all streams, before and after.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocodiff_compile.lab.bench.cases import Case
from cocodiff_compile.lab.bench.profile import ProfiledStep

NOISE_LIMIT = 0.1
COUNT_LIMIT = 0.05


@dataclass(frozen=True)
class VariantResult:
    """Holds the result of one variant at one point; `data` is what `measure` wrote."""

    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.data["name"])

    @property
    def title(self) -> str:
        return str(self.data["title"])

    @property
    def kind(self) -> str:
        return str(self.data["kind"])

    @property
    def reason(self) -> str:
        return str(self.data["reason"])

    @property
    def samples_s(self) -> Sequence[float]:
        return tuple(self.data["samples_s"])

    @property
    def step_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def least_s(self) -> float:
        return min(self.samples_s)

    @property
    def upper_s(self) -> float:
        """The upper quartile: three of four rounds took no longer."""
        return statistics.quantiles(self.samples_s, n=4, method="inclusive")[2]

    @property
    def compute_s(self) -> float:
        return float(statistics.median(self.data["compute_s"]))

    @property
    def counted_to_accounted(self) -> float | None:
        """The payload that the interface counted, relative to the bytes of the graph, if it did."""
        if not self.data["counted"] or not self.data["accounted_bytes"]:
            return None
        return float(self.data["counted"]["payload_bytes"] / self.data["accounted_bytes"])


@dataclass(frozen=True)
class Point:
    """A point is one case at one link speed."""

    case: Case
    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        share = self.data["share"]
        return self.case.title + ("" if share is None else f", {share} %")

    @property
    def profiled_steps(self) -> tuple[ProfiledStep, ...]:
        """Returns none for a case that was measured instead of profiled."""
        return tuple(map(ProfiledStep.from_json, self.data.get("profiled_steps", ())))

    @property
    def variants(self) -> tuple[VariantResult, ...]:
        return tuple(map(VariantResult, self.data.get("variants", ())))

    @property
    def ready(self) -> tuple[VariantResult, ...]:
        return tuple(variant for variant in self.variants if not variant.reason)

    @property
    def compute_s(self) -> float:
        """The least compute time of stock, or of the variant that replaces it as the base."""
        base = next(variant for variant in self.variants if variant.name == self.data["base"])
        return float(min(base.data["compute_s"]))

    @property
    def stream_bytes_per_s(self) -> float | None:
        return max(self.data["streams_bytes_per_s"], default=None)

    @property
    def wire_s(self) -> float:
        """The wire time; 0 where nothing crosses between nodes, or where the rate is unknown."""
        stream = self.stream_bytes_per_s
        return float(self.data["flat_bytes"] / stream) if stream else 0.0

    @property
    def share(self) -> float | None:
        """The measured share of communication in a stock step."""
        return 1 - self.stock.compute_s / self.stock.step_s if self.stock else None

    @property
    def limit_s(self) -> float:
        return max(self.compute_s, self.wire_s)

    @property
    def stock(self) -> VariantResult | None:
        return next((variant for variant in self.ready if variant.kind == "stock"), None)

    @property
    def best_rival(self) -> VariantResult | None:
        rivals = [variant for variant in self.ready if variant.kind == "rival"]
        return min(rivals, key=lambda variant: variant.step_s, default=None)

    def over_stock(self, variant: VariantResult) -> float | None:
        return self.stock.step_s / variant.step_s if self.stock else None

    def over_best_rival(self, variant: VariantResult) -> float | None:
        return self.best_rival.step_s / variant.step_s if self.best_rival else None

    def over_limit(self, variant: VariantResult) -> float:
        return variant.step_s / self.limit_s

    def exposed(self, variant: VariantResult) -> float | None:
        return (variant.step_s - variant.compute_s) / self.wire_s if self.wire_s else None

    def noise(self, variant: VariantResult) -> float:
        """Returns how far the speedup over stock differs between halves of the rounds: between odd
        and even ones, or earlier and later ones.
        """
        if self.stock is None or len(variant.samples_s) < 4:
            return 0.0
        samples = self.stock.samples_s, variant.samples_s
        middle = len(variant.samples_s) // 2
        noise = 0.0
        for halves in (slice(0, None, 2), slice(1, None, 2)), (slice(middle), slice(middle, None)):
            medians = [[statistics.median(s[half]) for s in samples] for half in halves]
            ratios = [stock / other for stock, other in medians]
            noise = max(noise, max(ratios) / min(ratios) - 1)
        return noise

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns the reasons why figures of this point should not be trusted."""
        warnings = [
            f"TOO NOISY: {variant.title}: speedups from two halves of the rounds differ by "
            f"{noise:.0%}, more than {NOISE_LIMIT:.0%}"
            for variant in self.ready
            if (noise := self.noise(variant)) > NOISE_LIMIT
        ]
        warnings += [
            f"COUNTED: {variant.title}: the interface sent {ratio - 1:+.1%} "
            "relative to the bytes accounted for"
            for variant in self.ready
            if (ratio := variant.counted_to_accounted) and abs(ratio - 1) > COUNT_LIMIT
        ]
        warnings += [
            f"LIMIT: {variant.title} is faster than the limit: the stream was measured too slow"
            for variant in self.ready
            if variant.least_s < self.limit_s
        ]
        return tuple(warnings)


@dataclass(frozen=True)
class Report:
    """Holds a whole run; `data` is the content of the JSON file."""

    data: Mapping[str, Any]

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(
            Point(Case.from_json(result["case"]), point)
            for result in self.data["results"]
            for point in result.get("points", ())
        )

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """The cases that could not be measured at all, and why."""
        return tuple(
            (Case.from_json(result["case"]).title, result["failure"])
            for result in self.data["results"]
            if result.get("failure")
        )

    @property
    def ulysses(self) -> dict[str, str]:
        """The project whose Ulysses the variants called "diffusers" run, by title of the case."""
        return {
            Case.from_json(result["case"]).title: result["ulysses"]
            for result in self.data["results"]
            if "ulysses" in result
        }
