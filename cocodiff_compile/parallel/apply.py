"""Turn on Ulysses for a diffusers transformer: all checks first, then all changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from diffusers import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cocodiff_compile.parallel.check_model import check_attentions, check_model
from cocodiff_compile.parallel.make_mesh import at_least_one_device, make_mesh, resolve_degree
from cocodiff_compile.parallel.mask_order import order_masks
from cocodiff_compile.parallel.plans import ModelPlan, plan_for
from cocodiff_compile.parallel.processors import replace_processors
from cocodiff_compile.parallel.split_tokens import check_shards, split_tokens
from cocodiff_compile.parallel.token_padding import TokenPadding
from cocodiff_compile.parallel.uneven_attention import UlyssesConfig, accept_uneven


def apply_ulysses(
    model: nn.Module,
    ulysses_degree: int | None,
    mesh: DeviceMesh | None,
    plan: Mapping[str, Any] | None,
) -> None:
    """What `parallelize` promises."""
    check_model(model)
    degree = resolve_degree(ulysses_degree, mesh)
    model_plan = plan_for(model, plan)
    check_shards(model, model_plan.shards)
    check_attentions(model, model_plan, degree)
    _apply(model, model_plan, mesh or make_mesh(model, degree), degree)


def _apply(model: nn.Module, plan: ModelPlan, mesh: DeviceMesh, degree: int) -> None:
    if plan.prepare is not None:
        plan.prepare(model)
    replace_processors(model, plan)
    config = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    with at_least_one_device():
        # An empty plan: diffusers sets up groups and processors, the hooks are ours.
        model.enable_parallelism(config=config, cp_plan={})  # type: ignore[operator]
    _exempt_whole_sequences(model, plan)
    padding = TokenPadding(degree, plan.streams.names if plan.streams else ())
    accept_uneven()
    _name_key_streams(model, plan, padding)
    # A hook added later runs further out: masks are ordered after the tokens are split.
    order_masks(model, plan.masks, padding)
    split_tokens(model, plan, config, padding)


def _exempt_whole_sequences(model: nn.Module, plan: ModelPlan) -> None:
    for name, module in model.named_modules():
        if not plan.is_whole(name) or not hasattr(module, "processor"):
            continue
        if hasattr(module.processor, "_parallel_config"):
            # A copy: one processor object may serve sharded modules too.
            processor: Any = copy.copy(module.processor)
            processor._parallel_config = None
            module.processor = processor


def _name_key_streams(model: nn.Module, plan: ModelPlan, padding: TokenPadding) -> None:
    """Give every attention that exchanges heads a config that says whose tokens its keys are."""
    configs: dict[Any, UlyssesConfig] = {}
    for name, module in model.named_modules():
        processor: Any = getattr(module, "processor", None)
        given = getattr(processor, "_parallel_config", None)
        if given is None or plan.is_whole(name):
            continue
        streams = plan.streams.keys_of(name, processor) if plan.streams else None
        if streams not in configs:
            configs[streams] = UlyssesConfig(
                given.context_parallel_config, padding=padding, key_streams=streams
            )
        if isinstance(given, UlyssesConfig) and given is not configs[streams]:
            module.processor = processor = copy.copy(processor)
        processor._parallel_config = configs[streams]
