# SPDX-License-Identifier: Apache-2.0
"""Defines the variants that are compared: what people run today, the best rivals, and cocodiff.

cache-dit replaces parts of diffusers in its process, so its variants run in processes of their own,
a second worker group besides the main one.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.bench.cases import Workload
from cocodiff_compile.lab.diffusers_ulysses import (
    at_least_one_device,
    enable_ulysses,
    has_ulysses,
)
from cocodiff_compile.passes import PASS_NAMES

Kind = Literal["stock", "rival", "ours"]

MAIN_GROUP = "main"
"""The worker group of the ranks' own processes."""

OVERLAP_PASSES = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_compute_for_overlap",
        "sink_waits",
        "raise_comms",
    ],
}
"""Turns on Inductor's overlap of collectives. Since torch 2.10 the flag alone has no effect."""


SHARED: Mapping[str, Any] = {"shard": {"min_gain": 0}}
"""Everything is shared out that can be: the models are small, and their links are slow."""
ONLY_SHARED = {**SHARED, "disable": tuple(name for name in PASS_NAMES if name != "shard-tokens")}
"""The graph that shard-tokens makes, which Inductor orders and compiles as any other."""


def stock_ulysses(workload: Workload) -> nn.Module:
    """Returns the model with diffusers' own Ulysses, or the plain model if diffusers has none."""
    model = workload.build()
    return enable_ulysses(model) if has_ulysses(type(model)) else model


def plain_model(workload: Workload) -> nn.Module:
    """Returns a model that computes everything on every rank."""
    return workload.build()


def ulysses_of(workload: Workload) -> str:
    """Returns whose Ulysses the variants called "diffusers" run."""
    if has_ulysses(workload.small_model.model_class):
        return "diffusers"
    return "shard-tokens (diffusers has no plan for this architecture)"


def cache_dit_async(workload: Workload) -> nn.Module:
    """Returns the model with cache-dit's asynchronous Ulysses. Raises UserError if it has none."""
    if importlib.util.find_spec("cache_dit") is None:
        raise UserError(
            "cache-dit is not installed: pip install --no-deps -c constraints.txt cache-dit einops"
        )
    import cache_dit  # noqa: PLC0415  (not a dependency)
    from cache_dit.distributed import enable_parallelism  # noqa: PLC0415
    from cache_dit.distributed.async_ulysses import AsyncUlyssesRegistry  # noqa: PLC0415

    model = workload.build()
    try:
        AsyncUlyssesRegistry.get_planner(model)
    except ValueError:
        raise UserError(
            f"cache-dit {cache_dit.__version__} has no asynchronous Ulysses for "
            f"{type(model).__name__}"
        ) from None
    config = cache_dit.ParallelismConfig(
        ulysses_size=torch.distributed.get_world_size(), ulysses_async=True
    )
    with at_least_one_device():
        enabled: nn.Module = enable_parallelism(model, config)
    return enabled


@dataclass(frozen=True)
class Variant:
    """A variant is one way to run a step. It runs eagerly if `options` is None."""

    name: str
    title: str
    build: Callable[[Workload], nn.Module] = stock_ulysses
    options: Mapping[str, Any] | None = None
    kind: Kind = "rival"
    backend: str = "inductor"
    worker_group: str = MAIN_GROUP
    measures_links: bool = False
    """Whether it measures the links to decide, and is compiled again for every link speed."""
    by_block: bool = False
    """Whether its blocks are compiled one by one."""

    def compile(self, model: nn.Module, fullgraph: bool) -> Callable[..., Any]:
        """Returns what runs a step."""
        if self.build is stock_ulysses and not has_ulysses(type(model)):
            return self._compile_sharded(model, fullgraph)
        if self.options is None:
            return model
        if self.by_block:
            model.compile_repeated_blocks(  # type: ignore[operator]
                backend=self.backend, options=dict(self.options), fullgraph=fullgraph, dynamic=False
            )
            return model
        return _compiled(model, self.backend, self.options, fullgraph)

    def _compile_sharded(self, model: nn.Module, fullgraph: bool) -> Callable[..., Any]:
        """Compiles a model for which diffusers has no Ulysses. Raises UserError if it is to run
        eagerly, where nobody makes Ulysses.
        """
        if self.options is None:
            raise UserError(f"diffusers has no Ulysses for {type(model).__name__}")
        if self.kind == "ours":
            return _compiled(model, self.backend, {**self.options, **SHARED}, fullgraph)
        compiled = _compiled(model, "cocodiff", ONLY_SHARED, fullgraph)
        return _with_settings(compiled, self.options)


def _compiled(
    model: nn.Module, backend: str, options: Mapping[str, Any], fullgraph: bool
) -> Callable[..., Any]:
    return torch.compile(  # type: ignore[call-overload,no-any-return]
        model,
        backend=backend,
        fullgraph=fullgraph,
        dynamic=False,
        options=dict(options),
        isolate_recompiles=True,
    )


def _with_settings(call: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a call under settings of Inductor."""

    @functools.wraps(call)
    def under_settings(*args: Any, **kwargs: Any) -> Any:
        with torch._inductor.config.patch(dict(settings)):
            return call(*args, **kwargs)

    return under_settings


def _ours(name: str, title: str, **options: Any) -> Variant:
    return Variant(name, title, stock_ulysses, options, "ours", "cocodiff", measures_links=True)


def _shared(name: str, title: str, by_block: bool = False) -> Variant:
    variant = _ours(name, title, **SHARED)
    return replace(variant, build=plain_model, by_block=by_block)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("eager", "diffusers, eager"),
        Variant("inductor", "diffusers + Inductor", options={}, kind="stock"),
        Variant("overlap", "diffusers + Inductor, overlap passes", options=OVERLAP_PASSES),
        Variant(
            "cache-dit-eager", "cache-dit async, eager", cache_dit_async, worker_group="cache-dit"
        ),
        Variant(
            "cache-dit",
            "cache-dit async + Inductor, overlap passes",
            cache_dit_async,
            OVERLAP_PASSES,
            worker_group="cache-dit",
        ),
        _ours("cocodiff", "cocodiff"),
        replace(_ours("cocodiff-blocks", "cocodiff, by blocks"), by_block=True),
        _shared("cocodiff-shard", "cocodiff, plain model"),
        _shared("cocodiff-shard-blocks", "cocodiff, plain model, by blocks", by_block=True),
        _ours("cocodiff-flat", "cocodiff, tapa off", tapa="off"),
        _ours("cocodiff-phases", "cocodiff, tapa on", tapa="on"),
        _ours("cocodiff-whole", "cocodiff, no chunks", head_chunks=1),
        _ours("cocodiff-chunks", "cocodiff, 2 chunks", head_chunks=2),
        _ours("cocodiff-unordered", "cocodiff, order as captured", v_first=False),
    )
}
STOCK = "inductor"
