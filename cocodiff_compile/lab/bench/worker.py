# SPDX-License-Identifier: Apache-2.0
"""Runs in one process of one rank: builds, compiles and calls the variants of its worker group."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from cocodiff_compile.compat import Unsupported, name_cpp_kernels
from cocodiff_compile.compiler.find_machines import forget_machines
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.lab.bench.cases import Workload
from cocodiff_compile.lab.bench.local_groups import Collective, local_groups
from cocodiff_compile.lab.bench.profile import profile_step
from cocodiff_compile.lab.bench.variants import VARIANTS
from cocodiff_compile.lab.distances import largest_relative_error
from cocodiff_compile.report.collect import collect_reports

_LARGEST_DIFFERENCE = {"fp32": 1e-3, "bf16": 1e-1}
"""The largest relative difference of a correct result; Inductor's own to eager is up to 5e-4."""


@dataclass(frozen=True)
class Compiled:
    """Holds the result of compiling a variant on this rank; `reason` says why it failed."""

    seconds: float
    reason: str = ""
    difference: float | None = None
    collectives: tuple[Collective, ...] = ()
    notes: tuple[str, ...] = ()


class Worker:
    """Serves one rank of a worker group, all of which call the same methods in the same order."""

    forget_links = staticmethod(forget_machines)
    """Makes later compilations measure the links again."""
    name_kernels = staticmethod(name_cpp_kernels)
    """Makes C++ kernels that are compiled from now on show their names to the profiler."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        model = workload.build()
        self._inputs = workload.inputs(model)
        self._reference = self._sample(model)
        """The result of the whole model in this process, eager."""
        self._models: dict[tuple[Callable[[Workload], nn.Module], bool], nn.Module] = {}
        self._calls: dict[str, Callable[..., Any]] = {}

    def build(self, name: str) -> str:
        """Builds the parallel model of a variant and calls it; returns the reason if that fails."""
        variant = VARIANTS[name]
        key = (variant.build, variant.by_block)  # blocks are compiled in place
        try:
            if key not in self._models:
                model = variant.build(self._workload)
                self._sample(model)  # some of diffusers' hooks compile only after a first call
                self._models[key] = model
        except Exception as error:
            return _reason(error)
        return ""

    def compile(self, name: str) -> Compiled:
        """Compiles a variant, again if it was compiled before, calls it and checks the result."""
        begin = time.monotonic()
        notes: list[str] = []
        try:
            with collect_reports() as reports:
                sample = self._first_call(name, notes)
                if VARIANTS[name].by_block:  # from now on blocks hand on shares
                    sample = self._sample(self._calls[name])
            seconds = time.monotonic() - begin
            difference = self._check(sample)
            with local_groups() as collectives:
                self._sample(self._calls[name])
        except Exception as error:
            return Compiled(time.monotonic() - begin, _reason(error))
        passes = [item for report in reports for item in report.summary["passes"]]
        notes += [note for item in passes for note in item["notes"]]
        return Compiled(seconds, "", difference, tuple(collectives), tuple(notes))

    def _first_call(self, name: str, notes: list[str]) -> torch.Tensor:
        """Compiles and calls a variant, as one graph if possible."""
        variant = VARIANTS[name]
        model = self._models[variant.build, variant.by_block]
        self._calls[name] = variant.compile(model, fullgraph=True)
        try:
            return self._sample(self._calls[name])
        except Unsupported as error:
            notes.append(f"breaks into several graphs: {_reason(error)}")
        self._calls[name] = variant.compile(model, fullgraph=False)
        return self._sample(self._calls[name])

    def _check(self, sample: torch.Tensor) -> float:
        difference = largest_relative_error([sample], [self._reference])
        if not difference <= _LARGEST_DIFFERENCE[self._workload.dtype]:
            raise ValueError(f"its result differs by {difference:.1e} from one eager process")
        return difference

    def timed(self, name: str, compute_only: bool) -> tuple[float, float]:
        """Times one call on this rank; `compute_only` replaces the exchanges by local copies."""
        dist.barrier()
        with local_groups() if compute_only else nullcontext():
            begin = time.monotonic()
            self._sample(self._calls[name])
            return begin, time.monotonic()

    def profiled(self, name: str) -> Timeline:
        """Returns one call on this rank under the profiler; all ranks begin together."""
        for _ in range(2):  # the profiler's own first time is no step's
            timeline = profile_step(dist.barrier, lambda: self._sample(self._calls[name]))
        return timeline

    def _sample(self, call: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            sample = self._workload.small_model.sample(call(**self._inputs))
        if sample.device.type != "cpu":
            torch.accelerator.synchronize()
        return sample


def _reason(error: Exception) -> str:
    """Returns the error in one line, without Dynamo's wrappers."""
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0]}" if lines else repr(inner)
