"""All ways of one case, measured together on live ranks.

Ranks do the same in the same order, each calling its own workers. A sample reaches from the first
rank's begin to the last one's end. Ways take turns, in another order each round, so that what slows
the machine slows all of them. Every way also runs alone, without its network: its computation.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.lab.bench.cases import Case
from cocodiff_compile.lab.bench.crews import Crews
from cocodiff_compile.lab.bench.find_rate import Trial
from cocodiff_compile.lab.bench.links import (
    Place,
    interface_counters,
    links_are_ours,
    set_rate,
    streams_bytes_per_s,
)
from cocodiff_compile.lab.bench.local_groups import Collective, NodeTraffic, traffic_between
from cocodiff_compile.lab.bench.profile import ProfiledStep
from cocodiff_compile.lab.bench.set_share import set_share
from cocodiff_compile.lab.bench.ways import MAIN_CREW, STOCK, WAYS, Way, ulysses_of
from cocodiff_compile.lab.bench.worker import Compiled
from cocodiff_compile.lab.progress import Say
from cocodiff_compile.ranks.agreement.all_ranks import gathered, largest


def crews_of(cases: Sequence[Case]) -> list[str]:
    """The crews beside the main one that the cases' ways need."""
    return sorted({WAYS[name].crew for case in cases for name in case.ways} - {MAIN_CREW})


def measure_case(case: Case, workers: Crews, say: Say) -> dict[str, Any]:
    """Plain data, the same on every rank, all of which call this; `say` is told how it goes."""
    workers.call_all("start", case.workload)
    if case.profiled:
        workers.call_all("name_kernels")
    return _Measurement(case, Place.here(), workers, say).run()


class _Measurement:
    def __init__(self, case: Case, place: Place, workers: Crews, say: Say) -> None:
        self.case, self.place, self.workers, self.say = case, place, workers, say
        self.ways = [WAYS[name] for name in case.ways]
        self.compiled: dict[str, Compiled] = {}
        self.unbuilt: dict[str, str] = {}
        self.trials: list[Trial] = []
        """Rates, and how long communication took at them."""

    def run(self) -> dict[str, Any]:
        for way in self.ways:
            if reason := self._agreed(self.workers.call(way.crew, "build", way.name)):
                self.unbuilt[way.name] = reason
        self._compile_all([way for way in self.ways if not way.measures_links])
        return {
            "case": self.case.to_json(),
            "ulysses": ulysses_of(self.case.workload),
            "points": list(self._points()),
        }

    def _points(self) -> Iterator[dict[str, Any]]:
        if not links_are_ours():
            yield self._point(None, None)
            return
        for share in self.case.shares:
            yield self._point(share, self._find_rate(share))
        for rate_mbit in self.case.rates_mbit:
            yield self._point(None, rate_mbit)

    def _agreed(self, reason: str) -> str:
        """What fails on one rank is not measured on any: the first rank's reason, for all."""
        return next(filter(None, gathered(reason)), "")

    def _reason(self, way: Way) -> str:
        compiled = self.compiled.get(way.name)
        return self.unbuilt.get(way.name, "") or (compiled.reason if compiled else "")

    @property
    def _base(self) -> Way:
        """What the links are set by, and the limit is that of: stock, or what else there is."""
        ready = [way for way in self.ways if way.name in self.compiled and not self._reason(way)]
        stock = [way for way in ready if way.name == STOCK]
        if not ready:
            raise RuntimeError(f"no way can run: {self._reason(self.ways[0])}")
        return (stock or ready)[0]

    def _compile_all(self, ways: Sequence[Way]) -> None:
        """Crews compile side by side, the ways of one crew one after the other."""
        for way in ways:
            if way.name in self.unbuilt:
                self.say(f"{way.title}: {self.unbuilt[way.name]}")
        wanted = [way for way in ways if way.name not in self.unbuilt]
        while wanted:
            turn = {way.crew: way for way in reversed(wanted)}
            names = {crew: way.name for crew, way in turn.items()}
            for crew, compiled in self.workers.call_each("compile", names):
                self._compiled(turn[crew], compiled)
            wanted = [way for way in wanted if way not in turn.values()]

    def _compiled(self, way: Way, compiled: Compiled) -> None:
        reason = self._agreed(compiled.reason)
        self.compiled[way.name] = compiled.because(reason)
        self.say(f"{way.title}: {reason or f'ready in {compiled.seconds:.0f} s'}")

    def _find_rate(self, share: int) -> float:
        """That makes communication `share` per cent of a stock step: the nearest of some tried."""
        megabits = self._node_traffic(self._base).size_bytes * 8 / 1e6
        return set_share(share, lambda alone: self._timed(self._base, alone), megabits, self.trials)

    def _point(self, share: int | None, rate_mbit: float | None) -> dict[str, Any]:
        """All ways at one speed of the links."""
        if rate_mbit is not None:
            set_rate(rate_mbit)
        where = "links as they are" if rate_mbit is None else f"{rate_mbit:.0f} Mbit/s"
        where = where if share is None else f"{share} % at {where}"
        self._compile_for_links()
        point = {"share": share, "rate_mbit": rate_mbit}
        ready = [way for way in self.ways if not self._reason(way)]
        if self.case.profiled:
            return {**point, "profiled_steps": self._profiled_steps(ready)}
        return {**point, **self._figures(ready, where)}

    def _compile_for_links(self) -> None:
        """What decides by the speed of the links is compiled at this speed."""
        ways = [way for way in self.ways if way.measures_links]
        with _nothing_measured_before():
            for crew in sorted({way.crew for way in ways}):
                self.workers.call(crew, "forget_links")
            self._compile_all(ways)

    def _figures(self, ready: Sequence[Way], where: str) -> dict[str, Any]:
        flat = self._node_traffic(self._base)
        counted = {way.name: self._counted(way) for way in ready}
        streams = streams_bytes_per_s(self.place)
        load = [os.getloadavg()[0]]
        samples = self._interleaved(ready, where)
        return {
            "streams_bytes_per_s": [*streams, *streams_bytes_per_s(self.place)],
            "base": self._base.name,
            "flat_bytes": flat.size_bytes,
            "flat_messages": flat.messages,
            "load_average": [*load, os.getloadavg()[0]],
            "ways": [self._describe(way, samples, counted.get(way.name)) for way in self.ways],
        }

    def _profiled_steps(self, ready: Sequence[Way]) -> list[dict[str, Any]]:
        """Returns those of all ranks."""
        found: list[dict[str, Any]] = []
        for way in ready:
            timeline = self.workers.call(way.crew, "profiled", way.name)
            found += gathered(ProfiledStep(way.title, self.place.rank, timeline).to_json())
            self.say(f"{way.title}: profiled")
        return found

    def _describe(
        self,
        way: Way,
        samples: dict[tuple[str, bool], list[float]],
        counted: dict[str, int] | None,
    ) -> dict[str, Any]:
        compiled = self.compiled.get(way.name, Compiled(0.0))
        own = self._node_traffic(way)
        return {
            "name": way.name,
            "title": way.title,
            "kind": way.kind,
            "reason": self._reason(way),
            "notes": list(compiled.notes),
            "difference": compiled.difference,
            "compile_s": compiled.seconds,
            "samples_s": samples.get((way.name, False), []),
            "compute_s": samples.get((way.name, True), []),
            "counted": counted,
            "accounted_bytes": own.size_bytes,
            "accounted_messages": own.messages,
        }

    def _node_traffic(self, way: Way) -> NodeTraffic:
        """Returns what the busiest node sends to others in a step."""
        compiled = self.compiled.get(way.name)
        collectives: Sequence[Collective] = compiled.collectives if compiled else ()
        mine = traffic_between(collectives, self.place.rank, self.place.node_of)
        sent = torch.zeros(self.place.num_nodes, 2, dtype=torch.int64)
        sent[self.place.node_of(self.place.rank)] = torch.tensor([mine.size_bytes, mine.messages])
        dist.all_reduce(sent)
        size_bytes, messages = sent.max(dim=0).values.tolist()
        return NodeTraffic(size_bytes, messages)

    def _counted(self, way: Way) -> dict[str, int] | None:
        """What the interface of the busiest node counts in one step."""
        before = interface_counters()
        self._timed(way)
        after = interface_counters()
        if before is None or after is None or self.place.num_nodes == 1:
            return None
        sent = after - before
        return {
            "payload_bytes": int(largest(sent.payload_bytes)),
            "packets": int(largest(sent.packets)),
        }

    def _interleaved(self, ready: Sequence[Way], where: str) -> dict[tuple[str, bool], list[float]]:
        """Samples by the name of a way and whether it ran alone."""
        turns = [(way, alone) for way in ready for alone in (False, True)]
        samples: dict[tuple[str, bool], list[float]] = {
            (way.name, alone): [] for way, alone in turns
        }
        order = random.Random(0)  # the same on every rank
        for number in range(self.case.repeats):
            for way, alone in order.sample(turns, len(turns)):
                samples[way.name, alone].append(self._timed(way, alone))
            self.say(f"{where}: round {number + 1} of {self.case.repeats}")
        return samples

    def _timed(self, way: Way, alone: bool = False) -> float:
        """Seconds from the first rank's begin to the last one's end; on several machines, whose
        clocks differ, of the slowest rank.
        """
        begin, end = self.workers.call(way.crew, "timed", way.name, alone)
        if links_are_ours() or self.place.num_nodes == 1:
            return largest(end) + largest(-begin)
        return largest(end - begin)


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
