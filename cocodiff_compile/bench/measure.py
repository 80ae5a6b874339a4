"""All ways of one case, measured together on live ranks.

Ranks do the same in the same order, each calling its own workers. A sample is the time of the
slowest rank. Ways take turns, round by round, so that what slows the machine slows all of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.bench.cases import Case
from cocodiff_compile.bench.crews import MAIN, Crews
from cocodiff_compile.bench.links import (
    Place,
    interface_counters,
    links_are_emulated,
    set_rate,
    slowest,
    stream_bytes_per_s,
)
from cocodiff_compile.bench.local_groups import Collective, Traffic, traffic_between
from cocodiff_compile.bench.profile import Timeline
from cocodiff_compile.bench.ways import STOCK, WAYS, Way
from cocodiff_compile.bench.worker import Compiled

Say = Callable[[str], None]
_COMPUTE = "compute"
_TRIALS = 3


def crews_of(cases: Sequence[Case]) -> list[str]:
    """The crews beside the main one that the cases' ways need."""
    return sorted({WAYS[name].crew for case in cases for name in case.ways} - {MAIN})


def measure_case(case: Case, workers: Crews, say: Say) -> dict[str, Any]:
    """Plain data, the same on every rank, all of which call this; `say` is told how it goes."""
    workers.call_all("start", case.workload)
    return _Measurement(case, Place.here(), workers, say).run()


class _Measurement:
    def __init__(self, case: Case, place: Place, workers: Crews, say: Say) -> None:
        self.case, self.place, self.workers, self.say = case, place, workers, say
        self.ways = [WAYS[name] for name in case.ways]
        self.compiled: dict[str, Compiled] = {}
        self.reasons: dict[str, str] = {}
        self.slowdown = 1.5
        """Of exchanges compared with a plain stream; corrected at every point."""

    def run(self) -> dict[str, Any]:
        for way in self.ways:
            self._agree(way.name, self.workers.call(way.crew, "build", way.name))
        self._compile_all([way for way in self.ways if not way.measures_links])
        if STOCK in self.reasons:
            raise RuntimeError(f"{WAYS[STOCK].title} cannot run: {self.reasons[STOCK]}")
        self.flat = self.compiled[STOCK].collectives
        return {"case": self.case.to_json(), "points": list(self._points())}

    def _points(self) -> Iterator[dict[str, Any]]:
        if not links_are_emulated():
            yield self._point(None, None)
            return
        for share in self.case.shares:
            yield self._point(share, self._find_rate(share))
        for rate_mbit in self.case.rates_mbit:
            yield self._point(None, rate_mbit)

    def _agree(self, name: str, reason: str) -> None:
        """What fails on one rank is not measured on any."""
        reasons: list[str] = [""] * self.place.num_ranks
        dist.all_gather_object(reasons, reason)
        if failed := next(filter(None, reasons), ""):
            self.reasons[name] = failed

    def _compile_all(self, ways: Sequence[Way]) -> None:
        """Crews compile side by side, the ways of one crew one after the other."""
        for way in ways:
            if way.name in self.reasons:
                self.say(f"{way.title}: {self.reasons[way.name]}")
        wanted = [way for way in ways if way.name not in self.reasons]
        while wanted:
            turn = list({way.crew: way for way in reversed(wanted)}.values())
            for way in turn:
                if way.crew != MAIN:
                    self.workers.begin(way.crew, "compile", way.name)
            for way in sorted(turn, key=lambda way: way.crew != MAIN):
                if way.crew == MAIN:
                    self._compiled(way, self.workers.call(MAIN, "compile", way.name))
                else:
                    self._compiled(way, self.workers.finish(way.crew))
            wanted = [way for way in wanted if way not in turn]

    def _compiled(self, way: Way, compiled: Compiled) -> None:
        self.compiled[way.name] = compiled
        self._agree(way.name, compiled.reason)
        reason = self.reasons.get(way.name)
        self.say(f"{way.title}: {reason or f'ready in {compiled.seconds:.0f} s'}")

    def _is_ready(self, way: Way) -> bool:
        return way.name not in self.reasons

    def _find_rate(self, share: int) -> float:
        """That makes communication `share` per cent of a stock step, by trying."""
        compute_s = min(self._computed() for _ in range(_TRIALS))
        wanted_s = compute_s * share / (100 - share)
        plain_mbit = self._node_traffic(self.flat).size_bytes / wanted_s * 8 / 1e6
        set_rate(plain_mbit * self.slowdown)
        step_s = min(self._timed(MAIN, STOCK) for _ in range(_TRIALS))
        self.slowdown *= max(step_s - compute_s, 0.1 * wanted_s) / wanted_s
        return plain_mbit * self.slowdown

    def _point(self, share: int | None, rate_mbit: float | None) -> dict[str, Any]:
        """All ways at one speed of the links."""
        if rate_mbit is not None:
            set_rate(rate_mbit)
        where = "links as they are" if rate_mbit is None else f"{rate_mbit:.0f} Mbit/s"
        where = where if share is None else f"{share} % at {where}"
        self._compile_for_links()
        point = {"share": share, "rate_mbit": rate_mbit}
        ready = [way for way in self.ways if self._is_ready(way)]
        if self.case.profiled:
            return {**point, "timelines": self._timelines(ready)}
        return {**point, **self._figures(ready, where)}

    def _compile_for_links(self) -> None:
        """What decides by the speed of the links is compiled at this speed."""
        with _nothing_measured_before():
            self.workers.call(MAIN, "forget_links")
            self._compile_all([way for way in self.ways if way.measures_links])

    def _figures(self, ready: Sequence[Way], where: str) -> dict[str, Any]:
        flat = self._node_traffic(self.flat)
        stream = stream_bytes_per_s(self.place)
        counted = {way.name: self._counted(way) for way in ready}
        load = [os.getloadavg()[0]]
        samples = self._interleaved(ready, where)
        return {
            "stream_bytes_per_s": stream,
            "flat_bytes": flat.size_bytes,
            "flat_messages": flat.messages,
            "load_average": [*load, os.getloadavg()[0]],
            "compute_s": samples[_COMPUTE],
            "ways": [
                self._describe(way, samples.get(way.name, []), counted.get(way.name))
                for way in self.ways
            ],
        }

    def _timelines(self, ready: Sequence[Way]) -> list[dict[str, Any]]:
        """Of all ranks."""
        found: list[dict[str, Any]] = []
        for way in ready:
            self._timed(way.crew, way.name)
            spans = tuple(self.workers.call(way.crew, "profiled", way.name))
            mine = Timeline(way.title, self.place.rank, spans).to_json()
            everyone: list[Any] = [None] * self.place.num_ranks
            dist.all_gather_object(everyone, mine)
            found += everyone
            self.say(f"{way.title}: profiled")
        return found

    def _describe(
        self, way: Way, samples: list[float], counted: dict[str, int] | None
    ) -> dict[str, Any]:
        compiled = self.compiled.get(way.name, Compiled(0.0))
        own = self._node_traffic(compiled.collectives)
        return {
            "name": way.name,
            "title": way.title,
            "kind": way.kind,
            "reason": self.reasons.get(way.name, ""),
            "notes": list(compiled.notes),
            "difference": compiled.difference,
            "compile_s": compiled.seconds,
            "samples_s": samples,
            "counted": counted,
            "accounted_bytes": own.size_bytes,
            "accounted_messages": own.messages,
        }

    def _node_traffic(self, collectives: Sequence[Collective]) -> Traffic:
        """What the busiest node sends to others in a step."""
        mine = traffic_between(collectives, self.place.rank, self.place.node_of)
        sent = torch.zeros(self.place.num_nodes, 2, dtype=torch.int64)
        sent[self.place.node_of(self.place.rank)] = torch.tensor([mine.size_bytes, mine.messages])
        dist.all_reduce(sent)
        size_bytes, messages = sent.max(dim=0).values.tolist()
        return Traffic(size_bytes, messages)

    def _counted(self, way: Way) -> dict[str, int] | None:
        """What the interface of the busiest node counts in one step."""
        before = interface_counters()
        self._timed(way.crew, way.name)
        after = interface_counters()
        if before is None or after is None or self.place.num_nodes == 1:
            return None
        sent = after - before
        return {
            "payload_bytes": int(slowest(sent.payload_bytes)),
            "packets": int(slowest(sent.packets)),
        }

    def _interleaved(self, ready: Sequence[Way], where: str) -> dict[str, list[float]]:
        turns: dict[str, Callable[[], float]] = {
            way.name: partial(self._timed, way.crew, way.name) for way in ready
        }
        turns[_COMPUTE] = self._computed
        samples: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(self.case.repeats):
            first = number % len(turns)  # each goes first as often as the others
            for name in [*turns][first:] + [*turns][:first]:
                samples[name].append(turns[name]())
            self.say(f"{where}: round {number + 1} of {self.case.repeats}")
        return samples

    def _timed(self, crew: str, name: str) -> float:
        return slowest(self.workers.call(crew, "timed", name))

    def _computed(self) -> float:
        """A stock step with local copies instead of exchanges."""
        return slowest(self.workers.call(WAYS[STOCK].crew, "timed", STOCK, True))


@contextmanager
def _nothing_measured_before() -> Iterator[None]:
    """The backend's memory of measured links is an empty folder."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
