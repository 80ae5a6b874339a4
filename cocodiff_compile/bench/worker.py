"""One process of one rank: builds, compiles and calls the ways of its crew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from cocodiff_compile.bench.cases import DTYPES, Workload
from cocodiff_compile.bench.local_groups import Collective, local_groups
from cocodiff_compile.bench.profile import Span, profile_step
from cocodiff_compile.bench.ways import WAYS
from cocodiff_compile.report.collect import GraphReport, collect_reports
from cocodiff_compile.topology.find_machines import forget_machines

_LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Of a result to be taken for right, relative to the reference's largest value. Inductor's own
distance to eager is up to 5e-4.
"""


@dataclass(frozen=True)
class Compiled:
    """What came of making a way ready on this rank; `reason` says why it is not."""

    seconds: float
    reason: str = ""
    difference: float | None = None
    collectives: tuple[Collective, ...] = ()
    notes: tuple[str, ...] = ()


class Worker:
    """All ranks of a crew call the same methods in the same order."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = workload.build()
        self._inputs = workload.inputs(self._model)
        self._models: dict[str, nn.Module] = {}
        self._calls: dict[str, Callable[..., Any]] = {}
        self._reference = self._sample(self._model)
        """Of the whole model in this process, eager."""

    def build(self, name: str) -> str:
        """Makes the parallel model of a way; the reason if that cannot be done."""
        try:
            self._models[name] = WAYS[name].build(self._workload)
        except Exception as error:
            return _first_line(error)
        return ""

    def compile(self, name: str) -> Compiled:
        """Makes a way ready, anew if it was before, by calls whose result is checked."""
        begin = time.monotonic()
        try:
            call = self._calls[name] = WAYS[name].compile(self._models[name])
            with collect_reports() as reports:
                sample = self._sample(call)
            seconds = time.monotonic() - begin
            difference = self._check(sample)
            with local_groups() as collectives:
                self._sample(call)
        except Exception as error:
            return Compiled(time.monotonic() - begin, _first_line(error))
        return Compiled(seconds, "", difference, tuple(collectives), _notes(reports))

    def _check(self, sample: torch.Tensor) -> float:
        difference = (sample - self._reference).abs().max() / self._reference.abs().max()
        largest = _LARGEST_DIFFERENCE[DTYPES[self._workload.dtype]]
        if not difference.item() <= largest:
            raise ValueError(f"its result is off by {difference.item():.1e} of one process, eager")
        return difference.item()

    def forget_links(self) -> None:
        """What is compiled from now on measures the links again."""
        forget_machines()

    def timed(self, name: str, alone: bool = False) -> float:
        """Seconds of one call on this rank; all ranks begin together. `alone`: every rank for
        itself, with local copies for exchanges.
        """
        dist.barrier()
        with local_groups() if alone else nullcontext():
            begin = time.perf_counter()
            self._sample(self._calls[name])
            return time.perf_counter() - begin

    def profiled(self, name: str) -> list[Span]:
        """One call on this rank under the profiler; all ranks begin together."""
        dist.barrier()
        return profile_step(lambda: self._sample(self._calls[name]))

    def _sample(self, call: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            sample = self._workload.small_model.sample(call(**self._inputs))
        if sample.device.type != "cpu":
            torch.accelerator.synchronize()
        return sample


def _notes(reports: Sequence[GraphReport]) -> tuple[str, ...]:
    passes = [item for report in reports for item in report.summary["passes"]]
    return tuple(note for item in passes for note in item["notes"])


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
