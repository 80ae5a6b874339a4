"""Refuses a model that Ulysses would compute wrongly, before anything is changed.

diffusers itself shards the tokens of any model that has a plan; an attention that does not support
it then sees its own shard only, and nothing is raised.
"""

from __future__ import annotations

from typing import Any

from diffusers import ModelMixin
from diffusers.hooks.sea_cache import SeaCacheRootHook
from diffusers.hooks.smoothed_energy_guidance_utils import SmoothedEnergyGuidanceHook
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import FusedJointAttnProcessor2_0
from torch import nn

from cocodiff_compile.parallel.plans import ModelPlan
from cocodiff_compile.parallel.processors import REPLACED, UlyssesFusedJointAttnProcessor


def check_model(model: nn.Module) -> None:
    """Raises ValueError unless `model` is a diffusers model that can be parallelised at all."""
    name = type(model).__name__
    if not isinstance(model, ModelMixin):
        raise ValueError(
            f"{name} is not a diffusers model: pass the transformer itself (not a pipeline), "
            "before it is wrapped by torch.compile, FSDP or DDP."
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(f"This {name} is already parallelised: call parallelize() once per model.")
    if getattr(getattr(model, "config", None), "is_amplify_history", False):
        raise ValueError(
            f"{name} with is_amplify_history=True amplifies the first keys by their position, "
            "which a shard does not have: use a model without it, or run it on one rank."
        )
    if getattr(getattr(model, "config", None), "image_condition_type", None) == "token_replace":
        raise ValueError(
            f"{name} with image_condition_type='token_replace' picks out the first frame's tokens "
            "by position, which a shard does not have: use a model with 'latent_concat' or without "
            "image conditioning, or run it on one rank."
        )


def check_attentions(model: nn.Module, plan: ModelPlan, degree: int) -> None:
    """Raises ValueError for the first attention of the sharded part that cannot exchange heads."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or plan.is_whole(name):
            continue
        _check_processor(name, processor)
        _check_fused(name, module, processor)
        _check_heads(name, module, degree)
        _check_backend(name, module, processor)


def check_hooks(model: nn.Module, plan: ModelPlan) -> None:
    """Raises ValueError for a diffusers hook that goes wrong with a share of the tokens."""
    for name, module in model.named_modules():
        registry: Any = module.__dict__.get("_diffusers_hook")
        for hook in [] if registry is None else registry.hooks.values():
            if isinstance(hook, SmoothedEnergyGuidanceHook):
                raise ValueError(
                    f"Smoothed energy guidance blurs the queries of {name!r} as a picture, of "
                    "which a rank has its share of rows only: run it on one rank, or choose "
                    "another guidance."
                )
            if isinstance(hook, SeaCacheRootHook) and plan.splits_inputs:
                raise ValueError(
                    f"SeaCache decides from the inputs of {type(model).__name__}, which are split "
                    "over the ranks, so that each would decide for itself: call disable_cache() "
                    "and choose another cache, such as FirstBlockCacheConfig."
                )


def _check_processor(name: str, processor: Any) -> None:
    kind = type(processor).__name__
    if type(processor) in REPLACED or hasattr(processor, "_parallel_config"):
        return
    if "Fused" in kind:
        raise ValueError(
            f"The attention {name!r} has fused QKV projections ({kind}), which do not "
            "support Ulysses: call model.unfuse_qkv_projections() first."
        )
    raise ValueError(
        f"The attention {name!r} uses {kind}, which does not support Ulysses and would attend "
        "to its own shard only: give it a processor that calls dispatch_attention_fn(..., "
        "parallel_config=self._parallel_config), or, if it runs on whole sequences, pass a "
        f"plan with {{{name!r}: None}}."
    )


def _check_fused(name: str, module: nn.Module, processor: Any) -> None:
    is_fused = type(processor) in (FusedJointAttnProcessor2_0, UlyssesFusedJointAttnProcessor)
    if is_fused and getattr(module, "norm_q", None) is not None:
        raise ValueError(
            f"diffusers' processor for the fused QKV projections of {name!r} skips the norms "
            "of its queries and keys: call model.unfuse_qkv_projections()."
        )


def _check_heads(name: str, module: nn.Module, degree: int) -> None:
    heads = getattr(module, "heads", None)
    if isinstance(heads, int) and heads < degree:
        raise ValueError(
            f"The attention {name!r} has {heads} heads, fewer than the Ulysses degree {degree}, so "
            f"that some ranks would have none: choose a degree of at most {heads}."
        )


def _check_backend(name: str, module: nn.Module, processor: Any) -> None:
    asked = getattr(processor, "_attention_backend", None)
    backend = (
        _AttentionBackendRegistry.get_active_backend()[0]
        if asked is None
        else AttentionBackendName(asked)
    )
    on_cpu = next(module.parameters()).device.type == "cpu"
    usable = ["native"] if on_cpu else sorted(_AttentionBackendRegistry._supports_context_parallel)
    if backend.value not in usable:
        raise ValueError(
            f"The attention {name!r} uses the diffusers attention backend {backend.value!r}, which "
            f"cannot run Ulysses{' on CPU' if on_cpu else ''}: call model.set_attention_backend() "
            f"with one of {usable} first."
        )
