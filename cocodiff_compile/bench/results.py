"""What the samples say: step times, the physical limit, what stays exposed, how noisy it was.

    compute  the stock graph with local copies instead of exchanges, seconds per step
    wire     bytes the busiest node must send to others / the rate of a plain stream
    limit    max(compute, wire): no order of the same work on the same links can be faster
    exposed  (step - compute) / wire: the part of the wire time that computation does not hide

Times are the least of all rounds, the machine at its quietest; medians stand beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocodiff_compile.bench.cases import Case
from cocodiff_compile.bench.profile import Timeline

NOISE_LIMIT = 0.1
STOCK_KIND, RIVAL_KIND, OURS_KIND = "stock", "rival", "ours"


@dataclass(frozen=True)
class WayResult:
    """One way at one point; `data` is what `measure` wrote."""

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
        return min(self.samples_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def counted_to_accounted(self) -> float | None:
        """Payload on the interface over the bytes of the graph; None where nothing was counted."""
        if not self.data["counted"] or not self.data["accounted_bytes"]:
            return None
        return float(self.data["counted"]["payload_bytes"] / self.data["accounted_bytes"])


@dataclass(frozen=True)
class Point:
    """One case at one speed of the links."""

    case: Case
    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        share = self.data["share"]
        return self.case.title + ("" if share is None else f", {share} %")

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Of a case that was profiled instead of measured."""
        return tuple(map(Timeline.from_json, self.data.get("timelines", ())))

    @property
    def ways(self) -> tuple[WayResult, ...]:
        return tuple(map(WayResult, self.data.get("ways", ())))

    @property
    def ready(self) -> tuple[WayResult, ...]:
        return tuple(way for way in self.ways if not way.reason)

    @property
    def compute_s(self) -> float:
        return float(min(self.data["compute_s"]))

    @property
    def wire_s(self) -> float:
        """0 where nothing crosses between nodes."""
        stream = self.data["stream_bytes_per_s"]
        return float(self.data["flat_bytes"] / stream) if stream else 0.0

    @property
    def limit_s(self) -> float:
        return max(self.compute_s, self.wire_s)

    @property
    def stock(self) -> WayResult | None:
        return next((way for way in self.ready if way.kind == STOCK_KIND), None)

    @property
    def best_rival(self) -> WayResult | None:
        rivals = [way for way in self.ready if way.kind == RIVAL_KIND]
        return min(rivals, key=lambda way: way.step_s, default=None)

    def over_stock(self, way: WayResult) -> float | None:
        return self.stock.step_s / way.step_s if self.stock else None

    def over_best_rival(self, way: WayResult) -> float | None:
        return self.best_rival.step_s / way.step_s if self.best_rival else None

    def over_limit(self, way: WayResult) -> float:
        return way.step_s / self.limit_s

    def exposed(self, way: WayResult) -> float | None:
        return (way.step_s - self.compute_s) / self.wire_s if self.wire_s else None

    def noise(self, way: WayResult) -> float:
        """How far the speedup over stock differs between the odd and the even rounds."""
        if self.stock is None or len(way.samples_s) < 4:
            return 0.0
        halves = [
            min(self.stock.samples_s[first::2]) / min(way.samples_s[first::2]) for first in (0, 1)
        ]
        return max(halves) / min(halves) - 1


@dataclass(frozen=True)
class Report:
    """A whole run; `data` is what is kept as JSON."""

    data: Mapping[str, Any]

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points())

    def _points(self) -> Iterator[Point]:
        for result in self.data["results"]:
            case = Case.from_json(result["case"])
            for point in result.get("points", ()):
                yield Point(case, point)

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """Cases that could not be measured at all, and why."""
        return tuple(
            (Case.from_json(result["case"]).title, result["failure"])
            for result in self.data["results"]
            if result.get("failure")
        )

    @property
    def noise(self) -> float:
        return max((point.noise(way) for point in self.points for way in point.ready), default=0.0)
