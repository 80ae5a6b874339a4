"""Split and gather tokens where a plan says so, with an error that names what does not divide.

diffusers has the same split hook; it reads a forward's signature while running, which Dynamo cannot
trace in one graph, fails on an argument left at its default, and raises a bare assertion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.context_parallel import (
    ContextParallelGatherHook,
    EquipartitionSharder,
    _get_submodule_by_name,
)
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelOutput
from torch import nn

from cocodiff_compile.parallel.forward_arguments import ForwardArguments

_GRADIENTS_ARE_ON = (
    "A parallelised model compiles for inference only, and gradients are on: call it under "
    "torch.no_grad() or torch.inference_mode()."
)


def check_shards(model: nn.Module, shards: Mapping[str, Any]) -> None:
    """ValueError if a plan names a module, or an argument of its forward, that is not there."""
    for pattern, entry in shards.items():
        names = [k for k in entry if isinstance(k, str)] if isinstance(entry, Mapping) else []
        for module in _modules(model, pattern):
            known = ForwardArguments.of(module).positions
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(
                    f"The plan splits {unknown} of {pattern!r}, but the forward of "
                    f"{type(module).__name__} takes {list(known)}: correct the plan."
                )


def split_tokens(
    model: nn.Module, shards: Mapping[str, Any], config: ContextParallelConfig
) -> None:
    """Hook every module that `shards`, a diffusers context-parallel plan, names."""
    for pattern, entry in shards.items():
        for module in _modules(model, pattern):
            registry = HookRegistry.check_if_exists_or_initialize(module)
            registry.register_hook(*_hook_for(pattern, entry, config))


def _modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    found = _get_submodule_by_name(model, pattern)
    return found if isinstance(found, list) else [found]


def _hook_for(pattern: str, entry: Any, config: ContextParallelConfig) -> tuple[ModelHook, str]:
    if isinstance(entry, Mapping):
        return SplitTokensHook(pattern, entry, config), f"cocodiff-split---{pattern}"
    outputs = [entry] if isinstance(entry, ContextParallelOutput) else list(entry)
    return ContextParallelGatherHook(outputs, config), f"cocodiff-gather---{pattern}"


class SplitTokensHook(ModelHook):  # type: ignore[misc]
    """Keep this rank's share of the inputs (named) and outputs (numbered) that `splits` lists.

    A tensor whose number of dims is not the expected one is passed on whole, as in diffusers: a
    timestep may be one number per sample or one per token.
    """

    def __init__(
        self, module_name: str, splits: Mapping[Any, Any], config: ContextParallelConfig
    ) -> None:
        super().__init__()
        self.module_name = module_name or "the model"
        self.inputs = {k: s for k, s in splits.items() if not getattr(s, "split_output", False)}
        self.outputs = {k: s for k, s in splits.items() if getattr(s, "split_output", False)}
        self.config = config

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self.arguments = ForwardArguments.of(module)
        return module

    def pre_forward(
        self, _module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, split in self.inputs.items():
            value = self.arguments.get(name, args, kwargs)
            if value is not None:
                share = self._share(name, value, split)
                args, kwargs = self.arguments.replace(name, share, args, kwargs)
        return args, kwargs

    def post_forward(self, _module: nn.Module, output: Any) -> Any:
        if not self.outputs:
            return output
        if isinstance(output, torch.Tensor):
            return self._share("output 0", output, self.outputs[0])
        shares = list(output)
        for index, split in self.outputs.items():
            shares[index] = self._share(f"output {index}", shares[index], split)
        return tuple(shares)

    def _share(self, name: str, value: Any, split: Any) -> Any:
        if isinstance(split, Sequence):
            return [
                self._share(f"{name}[{i}]", *pair)
                for i, pair in enumerate(zip(value, split, strict=True))
            ]
        if not isinstance(value, torch.Tensor) or split.expected_dims not in (None, value.dim()):
            return value
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise ValueError(_GRADIENTS_ARE_ON)
        num_tokens, degree = value.shape[split.split_dim], self.config.ulysses_degree
        if num_tokens % degree:
            raise ValueError(
                f"{name!r} of {self.module_name!r} has {num_tokens} tokens, which do not divide by "
                f"the Ulysses degree {degree}: pad it to a multiple of {degree}, choose another "
                "resolution, or a degree that divides it."
            )
        return EquipartitionSharder.shard(value, split.split_dim, self.config._flattened_mesh)
