"""Splits and gathers tokens where a plan says so, and pads tokens that do not divide, or refuses
them.

diffusers has the same split hook, but it reads a forward's signature while running, which Dynamo
cannot trace in one graph, fails on an argument left at its default, and raises a bare assertion.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks.context_parallel import EquipartitionSharder, _get_submodule_by_name
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelOutput
from torch import nn

from cocodiff_compile.parallel.forward_arguments import ForwardArguments, unwrapped
from cocodiff_compile.parallel.plans import ModelPlan
from cocodiff_compile.parallel.token_hook import CallArguments, KeyedHook, TokenHook
from cocodiff_compile.parallel.token_padding import TokenPadding, missing, pad_end

_GRADIENTS_ARE_ON = (
    "A parallelised model compiles for inference only, and gradients are on: call it under "
    "torch.no_grad() or torch.inference_mode()."
)


def check_shards(model: nn.Module, shards: Mapping[str, Any]) -> None:
    """Raises ValueError if a plan names a module, or an argument of it, that does not exist."""
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


def token_hooks(
    model: nn.Module, plan: ModelPlan, config: ContextParallelConfig, padding: TokenPadding
) -> list[KeyedHook]:
    """Returns a hook for every module that the plan names, with a stable key."""
    return [
        (f"{pattern}[{index}]", module, _hook_for(pattern, module, plan, config, padding))
        for pattern in plan.shards
        for index, module in enumerate(_modules(model, pattern))
    ]


def _modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    modules = _get_submodule_by_name(model, pattern)
    return list(map(unwrapped, modules if isinstance(modules, list) else [modules]))


def _hook_for(
    pattern: str,
    module: nn.Module,
    plan: ModelPlan,
    config: ContextParallelConfig,
    padding: TokenPadding,
) -> TokenHook:
    known, entry = plan.streams, plan.shards[pattern]
    if isinstance(entry, Mapping):
        streams = None if known is None else {key: known.split_at(pattern, key) for key in entry}
        name, arguments = pattern or "the model", ForwardArguments.of(module)
        return SplitTokensHook(name, entry, arguments, config, padding, streams)
    outputs = [entry] if isinstance(entry, ContextParallelOutput) else list(entry)
    stream = None if known is None else known.gathered_at(pattern)
    return GatherTokensHook(outputs, config, padding, stream)


@dataclass(eq=False)
class GatherTokensHook(TokenHook):
    """Joins the ranks' shares of a module's outputs, and cuts off the padding of the `stream`."""

    outputs: Sequence[ContextParallelOutput | None]
    config: ContextParallelConfig
    padding: TokenPadding
    stream: str | None

    def post_forward(self, output: Any) -> Any:
        shares = [output] if isinstance(output, torch.Tensor) else list(output)
        if len(shares) != len(self.outputs):
            raise ValueError(
                f"The plan gathers {len(self.outputs)} outputs of a module that returned "
                f"{len(shares)}: correct the plan."
            )
        pad = 0 if self.stream is None else self.padding.pad_of(self.stream)
        gathered = [
            share if entry is None else self._gather(share, entry.gather_dim, pad)
            for share, entry in zip(shares, self.outputs, strict=True)
        ]
        return gathered[0] if isinstance(output, torch.Tensor) else tuple(gathered)

    def _gather(self, share: torch.Tensor, dim: int, pad: int) -> torch.Tensor:
        whole: torch.Tensor = EquipartitionSharder.unshard(share, dim, self.config._flattened_mesh)
        return whole.narrow(dim, 0, whole.shape[dim] - pad) if pad else whole


@dataclass(eq=False)
class SplitTokensHook(TokenHook):
    """Keeps this rank's share of the inputs (named) and outputs (numbered) that `splits` lists.

    A tensor whose number of dims is not the expected one is passed on whole, as in diffusers: a
    timestep may be one number per sample or one per token. Tokens that do not divide are padded
    with zeros. `streams` says which of `splits` are the tokens themselves, rather than values per
    token; without it an attention could not distinguish padding from tokens, and such tokens are
    refused.
    """

    module_name: str
    splits: Mapping[Any, Any]
    arguments: ForwardArguments
    config: ContextParallelConfig
    padding: TokenPadding
    streams: Mapping[Any, str | None] | None

    def __post_init__(self) -> None:
        splits = self.splits.items()
        self.inputs = {key: s for key, s in splits if not getattr(s, "split_output", False)}
        self.outputs = {key: s for key, s in splits if getattr(s, "split_output", False)}

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        for name, split in self.inputs.items():
            value = self.arguments.get(name, args, kwargs)
            self._note(name, value, split)
            if value is not None:
                is_alike = self._is_alike_for_all(name, value, split)
                share = value if is_alike else self._share(name, value, split)
                args, kwargs = self.arguments.replace(name, share, args, kwargs)
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        if not self.outputs:
            return output
        if isinstance(output, torch.Tensor):
            self._note(0, output, self.outputs[0])
            return self._share("output 0", output, self.outputs[0])
        shares = list(output)
        for index, split in self.outputs.items():
            self._note(index, shares[index], split)
            shares[index] = self._share(f"output {index}", shares[index], split)
        return tuple(shares)

    def _note(self, key: Any, value: Any, split: Any) -> None:
        """Records a stream's tokens in this call, for the attentions and the gathering hook."""
        stream = None if self.streams is None else self.streams[key]
        if stream is not None:
            num_tokens = value.shape[split.split_dim] if _is_split(value, split) else None
            self.padding.set(stream, num_tokens)

    def _is_alike_for_all(self, name: str, value: Any, split: Any) -> bool:
        """Returns whether one entry, such as a timestep, serves all tokens and is no token."""
        is_stream = self.streams is None or self.streams[name] is not None
        return not is_stream and _is_split(value, split) and value.shape[split.split_dim] == 1

    def _share(self, name: str, value: Any, split: Any) -> Any:
        if isinstance(split, Sequence):
            return [
                self._share(f"{name}[{i}]", *pair)
                for i, pair in enumerate(zip(value, split, strict=True))
            ]
        # One per block, as a ControlNet gives them.
        if isinstance(value, dict):
            return {key: self._share(f"{name}[{key}]", v, split) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._share(f"{name}[{i}]", v, split) for i, v in enumerate(value)]
        if not _is_split(value, split):
            return value
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise ValueError(_GRADIENTS_ARE_ON)
        num_tokens, degree = value.shape[split.split_dim], self.config.ulysses_degree
        pad = missing(num_tokens, degree)
        if pad and self.streams is None:
            # Dynamo may hold sizes as symbols, which it cannot format.
            num_tokens, degree = operator.index(num_tokens), operator.index(degree)
            raise ValueError(
                f"{name!r} of {self.module_name!r} has {num_tokens} tokens, which do not divide by "
                f"the Ulysses degree {degree}, and neither a plan of your own nor one of "
                "diffusers says which attentions would see their padding: pad it to a "
                f"multiple of {degree}, choose another resolution, or a degree that divides it."
            )
        padded = pad_end(value, split.split_dim, pad)
        return EquipartitionSharder.shard(padded, split.split_dim, self.config._flattened_mesh)


def _is_split(value: Any, split: Any) -> bool:
    return isinstance(value, torch.Tensor) and split.expected_dims in (None, value.dim())
