"""Defines the variants that are compared: what people run today, the best rivals, and cocodiff.

cache-dit replaces parts of diffusers in its process, so its variants run in processes of their own,
a second worker group besides the main one.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.bench.cases import Workload
from cocodiff_compile.parallel import parallelize
from cocodiff_compile.parallel.make_mesh import at_least_one_device

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


def stock_ulysses(workload: Workload) -> nn.Module:
    """Returns the model with diffusers' own Ulysses, or that of `parallelize` if it has none."""
    from diffusers import ContextParallelConfig  # noqa: PLC0415  (slow, and optional)

    model = workload.build()
    if not has_stock_ulysses(type(model)):
        return parallelize(model)
    # diffusers 0.42 calls this where a plan splits arguments it has to look for, as Wan's does.
    if not hasattr(logging.Logger, "warning_once"):
        setattr(logging.Logger, "warning_once", logging.Logger.warning)  # noqa: B010
    config = ContextParallelConfig(ulysses_degree=torch.distributed.get_world_size())
    with at_least_one_device():
        model.enable_parallelism(config=config)  # type: ignore[operator]
    return model


def has_stock_ulysses(model_class: type[nn.Module]) -> bool:
    return getattr(model_class, "_cp_plan", None) is not None


def ulysses_of(workload: Workload) -> str:
    """Returns whose Ulysses the variants called "diffusers" run."""
    if has_stock_ulysses(workload.small_model.model_class):
        return "diffusers"
    return "cocodiff_compile.parallel (diffusers has no plan for this architecture)"


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

    def compile(self, model: nn.Module, fullgraph: bool) -> Callable[..., Any]:
        if self.options is None:
            return model
        return torch.compile(  # type: ignore[call-overload,no-any-return]
            model,
            backend=self.backend,
            fullgraph=fullgraph,
            dynamic=False,
            options=dict(self.options),
            isolate_recompiles=True,
        )


def _ours(name: str, title: str, **options: Any) -> Variant:
    return Variant(name, title, stock_ulysses, options, "ours", "cocodiff", measures_links=True)


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
        _ours("cocodiff-flat", "cocodiff, tapa off", tapa="off"),
        _ours("cocodiff-phases", "cocodiff, tapa on", tapa="on"),
        _ours("cocodiff-whole", "cocodiff, no chunks", head_chunks=1),
        _ours("cocodiff-chunks", "cocodiff, 2 chunks", head_chunks=2),
        _ours("cocodiff-unordered", "cocodiff, order as captured", v_first=False),
    )
}
STOCK = "inductor"
