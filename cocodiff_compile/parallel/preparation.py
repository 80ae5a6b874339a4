"""Keeps the changes of `parallelize` to a model valid from call to call.

Ordinary diffusers calls change a model afterwards: `set_attn_processor` and `fuse_qkv_projections`
install processors that do not support Ulysses, an adapter wraps the module that gathers the tokens,
`enable_cache` installs hooks that decide from this rank's tokens. Before every call the relevant
parts are compared with those of the last call. If anything differs, the model is prepared again as
it is now, or refused with the reason.

The comparison is made outside of compiled code, by the model's `__call__`, so that no graph
contains it. Where `__call__` itself is traced, in a function around the model, the comparison is
made while tracing; Dynamo traces again when a processor or a module that it read is replaced.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from cocodiff_compile.compat import skip_frame_of
from cocodiff_compile.parallel.cache_decisions import make_decisions_common
from cocodiff_compile.parallel.check_model import check_attentions, check_hooks
from cocodiff_compile.parallel.mask_order import mask_hooks
from cocodiff_compile.parallel.plans import ModelPlan, plan_for
from cocodiff_compile.parallel.processors import replace_processors
from cocodiff_compile.parallel.split_tokens import check_shards, token_hooks
from cocodiff_compile.parallel.token_hook import CallArguments, HookedModules, TokenHook
from cocodiff_compile.parallel.token_padding import TokenPadding
from cocodiff_compile.parallel.uneven_attention import UlyssesConfig


class Preparation(TokenHook):
    """Installs the processors and hooks that make one model run on several ranks."""

    def __init__(
        self,
        model: nn.Module,
        user_plan: Mapping[str, Any] | None,
        config: ContextParallelConfig,
        padding: TokenPadding,
    ) -> None:
        self._model = model
        self._user_plan = user_plan
        self._config = config
        self._padding = padding
        self._configs: dict[tuple[str, ...] | None, UlyssesConfig] = {}
        self._hooked = HookedModules()
        self._watched: list[nn.Module] = []
        self._attentions: list[nn.Module] = []
        self._seen: list[Any] = []
        self.is_current = False
        """Whether the model was checked for the call that is in progress."""
        self._prepare(plan_for(model, user_plan))

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Checks the model where `forward` is called directly."""
        if not self.is_current:
            self.renew()
        return args, kwargs

    @skip_frame_of
    def renew(self) -> None:
        """Prepares the model again if it was changed. Raises ValueError if that is not possible."""
        if torch.compiler.is_dynamo_compiling():
            reason = self._renew_while_tracing()
        else:
            reason = self._renew()
        if reason is not None:
            raise ValueError(reason)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _renew_while_tracing(self) -> str | None:
        return self._renew()  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _renew(self) -> str | None:
        now = self._snapshot()
        if len(now) == len(self._seen) and all(map(operator.is_, now, self._seen)):
            return None
        try:
            plan = plan_for(self._model, self._user_plan)
            check_prepared(self._model, plan, self._config.ulysses_degree)
            self._prepare(plan)
        except ValueError as error:
            return f"The model was changed since parallelize(). {error}"
        return None

    def _prepare(self, plan: ModelPlan) -> None:
        if plan.prepare is not None:
            plan.prepare(self._model)
        replace_processors(self._model, plan)
        _exempt_whole_sequences(self._model, plan)
        self._give_configs(plan)
        hooks = [
            ("changes", self._model, self),
            *token_hooks(self._model, plan, self._config, self._padding),
            # Masks are ordered after the tokens are split.
            *mask_hooks(self._model, plan.masks, self._padding),
        ]
        self._hooked.hook(hooks)
        self._watched = list(_watched(self._model, [module for _, module, _ in hooks]))
        self._attentions = [module for module in self._watched if _is_attention(module)]
        make_decisions_common(self._watched, self._config, self._padding)
        self._seen = self._snapshot()

    def _give_configs(self, plan: ModelPlan) -> None:
        """Gives every attention that exchanges heads its groups, and the streams of its keys."""
        for name, module in self._model.named_modules():
            processor: Any = getattr(module, "processor", None)
            if not hasattr(processor, "_parallel_config") or plan.is_whole(name):
                continue
            streams = plan.streams.keys_of(name, processor) if plan.streams else None
            if streams not in self._configs:
                self._configs[streams] = UlyssesConfig(
                    self._config, padding=self._padding, key_streams=streams
                )
            given, wanted = processor._parallel_config, self._configs[streams]
            if isinstance(given, UlyssesConfig) and given is not wanted:
                # One processor object may serve modules with other keys, or another model.
                module.processor = processor = copy.copy(processor)
            processor._parallel_config = wanted

    def _snapshot(self) -> list[Any]:
        """Returns everything that a later call may have replaced, in a fixed order."""
        seen: list[Any] = [_AttentionBackendRegistry.get_active_backend()[0]]
        for module in self._watched:
            state = module.__dict__
            seen += (state.get("forward"), *module._modules.values())
            if "_diffusers_hook" in state:
                seen += state["_diffusers_hook"].hooks.values()
        for module in self._attentions:
            processor: Any = module.processor
            seen += (
                processor,
                getattr(processor, "_parallel_config", None),
                getattr(processor, "_attention_backend", None),
            )
        return seen


def check_prepared(model: nn.Module, plan: ModelPlan, degree: int) -> None:
    """Raises ValueError, with the model unchanged, if Ulysses would compute it wrongly."""
    check_shards(model, plan.shards)
    check_attentions(model, plan, degree)
    check_hooks(model, plan)


def _is_attention(module: nn.Module) -> bool:
    return getattr(module, "processor", None) is not None


def _watched(model: nn.Module, hooked: list[nn.Module]) -> Iterator[nn.Module]:
    """Returns the attentions with their projections, the hooked modules, and all around them."""
    by_name = dict(model.named_modules())
    names = {name for name, module in by_name.items() if module in hooked}
    for name, module in by_name.items():
        if _is_attention(module):
            names |= {name, *(f"{name}.{child}" for child in module._modules)}
    for name in list(names):
        parts = name.split(".")
        names |= {".".join(parts[:length]) for length in range(len(parts))}
    return (module for name, module in by_name.items() if name in names)


def _exempt_whole_sequences(model: nn.Module, plan: ModelPlan) -> None:
    for name, module in model.named_modules():
        processor: Any = getattr(module, "processor", None)
        if plan.is_whole(name) and getattr(processor, "_parallel_config", None) is not None:
            # A copy: one processor object may serve sharded modules too.
            module.processor = processor = copy.copy(processor)
            processor._parallel_config = None
