# SPDX-License-Identifier: Apache-2.0
"""Measures all variants of one case together, on live ranks.

All ranks do the same in the same order, each calling its own workers. A sample lasts from the first
rank's begin to the last rank's end. Variants are interleaved, in another order each round, so that
whatever slows the machine slows all of them. Every variant also runs without its network, which
measures its computation.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cocodiff_compile.lab.bench.cases import Case
from cocodiff_compile.lab.bench.find_rate import Trial, set_share
from cocodiff_compile.lab.bench.links import (
    RankPosition,
    links_are_ours,
    sent_while,
    set_rate,
    streams_bytes_per_s,
)
from cocodiff_compile.lab.bench.local_groups import NodeTraffic, traffic_between
from cocodiff_compile.lab.bench.profile import ProfiledStep
from cocodiff_compile.lab.bench.variants import MAIN_GROUP, STOCK, VARIANTS, Variant, ulysses_of
from cocodiff_compile.lab.bench.worker import Compiled
from cocodiff_compile.lab.bench.worker_groups import WorkerGroups
from cocodiff_compile.lab.progress import Say
from cocodiff_compile.ranks.agreement.all_ranks import gathered, largest


def worker_groups_of(cases: Sequence[Case]) -> list[str]:
    """Returns the worker groups that the variants of the cases need besides the main one."""
    return sorted(
        {VARIANTS[name].worker_group for case in cases for name in case.variants} - {MAIN_GROUP}
    )


def measure_case(case: Case, workers: WorkerGroups, say: Say) -> dict[str, Any]:
    """Returns plain data, the same on every rank. All ranks must call this."""
    workers.call_all("start", case.workload)
    if case.profiled:
        workers.call_all("name_kernels")
    return _Measurement(case, RankPosition.here(), workers, say).run()


class _Measurement:
    def __init__(self, case: Case, position: RankPosition, workers: WorkerGroups, say: Say) -> None:
        self.case, self.position, self.workers, self.say = case, position, workers, say
        self.variants = [VARIANTS[name] for name in case.variants]
        self.compiled: dict[str, Compiled] = {}
        self.build_failures: dict[str, str] = {}
        self.trials: list[Trial] = []
        """Rates, and how long communication took at them."""

    def run(self) -> dict[str, Any]:
        for variant in self.variants:
            reason = self.workers.call(variant.worker_group, "build", variant.name)
            if reason := self._agreed(reason):
                self.build_failures[variant.name] = reason
        self._compile_all([variant for variant in self.variants if not variant.measures_links])
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
        """Returns the first reason of any rank: what fails on one rank is measured on none."""
        return next(filter(None, gathered(reason)), "")

    def _reason(self, variant: Variant) -> str:
        compiled = self.compiled.get(variant.name)
        return self.build_failures.get(variant.name, "") or (compiled.reason if compiled else "")

    @property
    def _base(self) -> Variant:
        """The variant that link speeds and the limit refer to: stock, or another if stock fails."""
        compiled = [variant for variant in self.variants if variant.name in self.compiled]
        ready = [variant for variant in compiled if not self._reason(variant)]
        if not ready:
            raise RuntimeError(f"no variant can run: {self._reason(self.variants[0])}")
        return next((variant for variant in ready if variant.name == STOCK), ready[0])

    def _compile_all(self, variants: Sequence[Variant]) -> None:
        """Compiles worker groups side by side, the variants of one group one after the other."""
        for variant in variants:
            if variant.name in self.build_failures:
                self.say(f"{variant.title}: {self.build_failures[variant.name]}")
        wanted = [variant for variant in variants if variant.name not in self.build_failures]
        while wanted:
            batch = {variant.worker_group: variant for variant in reversed(wanted)}
            names = {worker_group: (variant.name,) for worker_group, variant in batch.items()}
            for worker_group, compiled in self.workers.call_each("compile", names):
                variant, reason = batch[worker_group], self._agreed(compiled.reason)
                self.compiled[variant.name] = replace(compiled, reason=reason)
                self.say(f"{variant.title}: {reason or f'ready in {compiled.seconds:.0f} s'}")
            wanted = [variant for variant in wanted if variant not in batch.values()]

    def _find_rate(self, share: int) -> float:
        """Sets and returns the rate that gives communication about its share of a stock step."""
        megabits = self._node_traffic(self._base).size_bytes * 8 / 1e6
        return set_share(
            share, lambda compute_only: self._timed(self._base, compute_only), megabits, self.trials
        )

    def _point(self, share: int | None, rate_mbit: float | None) -> dict[str, Any]:
        """Measures all variants at one link speed."""
        if rate_mbit is not None:
            set_rate(rate_mbit)
        where = "links as they are" if rate_mbit is None else f"{rate_mbit:.0f} Mbit/s"
        where = where if share is None else f"{share} % at {where}"
        self._compile_for_links()
        point = {"share": share, "rate_mbit": rate_mbit}
        ready = [variant for variant in self.variants if not self._reason(variant)]
        if self.case.profiled:
            return {**point, "profiled_steps": self._profiled_steps(ready)}
        return {**point, **self._figures(ready, where)}

    def _compile_for_links(self) -> None:
        """Compiles the variants that depend on the speed of the links, at this speed."""
        variants = [variant for variant in self.variants if variant.measures_links]
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
            # The compiler's cache of measured links is empty here.
            for worker_group in sorted({variant.worker_group for variant in variants}):
                self.workers.call(worker_group, "forget_links")
            self._compile_all(variants)

    def _figures(self, ready: Sequence[Variant], where: str) -> dict[str, Any]:
        flat = self._node_traffic(self._base)
        counted = {variant.name: self._counted(variant) for variant in ready}
        streams = streams_bytes_per_s(self.position)
        load = [os.getloadavg()[0]]
        samples = self._interleaved(ready, where)
        return {
            "streams_bytes_per_s": [*streams, *streams_bytes_per_s(self.position)],
            "base": self._base.name,
            "flat_bytes": flat.size_bytes,
            "flat_messages": flat.messages,
            "load_average": [*load, os.getloadavg()[0]],
            "variants": [
                self._describe(variant, samples, counted.get(variant.name))
                for variant in self.variants
            ],
        }

    def _profiled_steps(self, ready: Sequence[Variant]) -> list[dict[str, Any]]:
        """Returns those of all ranks."""
        found: list[dict[str, Any]] = []
        for variant in ready:
            timeline = self.workers.call(variant.worker_group, "profiled", variant.name)
            found += gathered(ProfiledStep(variant.title, self.position.rank, timeline).to_json())
            self.say(f"{variant.title}: profiled")
        return found

    def _describe(
        self,
        variant: Variant,
        samples: dict[tuple[str, bool], list[float]],
        counted: dict[str, int] | None,
    ) -> dict[str, Any]:
        compiled = self.compiled.get(variant.name, Compiled(0.0))
        own = self._node_traffic(variant)
        return {
            "name": variant.name,
            "title": variant.title,
            "kind": variant.kind,
            "reason": self._reason(variant),
            "notes": list(compiled.notes),
            "difference": compiled.difference,
            "compile_s": compiled.seconds,
            "samples_s": samples.get((variant.name, False), []),
            "compute_s": samples.get((variant.name, True), []),
            "counted": counted,
            "accounted_bytes": own.size_bytes,
            "accounted_messages": own.messages,
        }

    def _node_traffic(self, variant: Variant) -> NodeTraffic:
        """Returns what the busiest node sends to others in a step."""
        compiled = self.compiled.get(variant.name, Compiled(0.0))
        position = self.position
        ranks = gathered(traffic_between(compiled.collectives, position.rank, position.node_of))
        starts = range(0, position.num_ranks, position.ranks_per_node)
        nodes = [ranks[start : start + position.ranks_per_node] for start in starts]
        return NodeTraffic(
            max(sum(rank.size_bytes for rank in node) for node in nodes),
            max(sum(rank.messages for rank in node) for node in nodes),
        )

    def _counted(self, variant: Variant) -> dict[str, int] | None:
        """Returns what the interface of the busiest node counts in one step."""
        sent = sent_while(lambda: self._timed(variant))
        return None if self.position.num_nodes == 1 else sent

    def _interleaved(
        self, ready: Sequence[Variant], where: str
    ) -> dict[tuple[str, bool], list[float]]:
        """Returns samples by the name of a variant and whether it ran without its network."""
        runs = [(variant, compute_only) for variant in ready for compute_only in (False, True)]
        samples: dict[tuple[str, bool], list[float]] = defaultdict(list)
        order = random.Random(0)  # the same on every rank
        for number in range(self.case.repeats):
            for variant, compute_only in order.sample(runs, len(runs)):
                samples[variant.name, compute_only].append(self._timed(variant, compute_only))
            self.say(f"{where}: round {number + 1} of {self.case.repeats}")
        return samples

    def _timed(self, variant: Variant, compute_only: bool = False) -> float:
        """Returns the seconds from the first rank's begin to the last rank's end. On several
        machines, whose clocks differ, returns the seconds of the slowest rank.
        """
        begin, end = self.workers.call(variant.worker_group, "timed", variant.name, compute_only)
        if links_are_ours() or self.position.num_nodes == 1:
            return largest(end) + largest(-begin)
        return largest(end - begin)
