"""Finds and replaces an argument of a module's forward by name, however it was passed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from cocodiff_compile.parallel.token_hook import CallArguments

_ANY_ARGUMENTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside of wrappers that pass all on, as `torch.compile(block)` does."""
    while not ForwardArguments.of(module).positions and len(module._modules) == 1:
        (inner,) = module._modules.values()
        if inner is None:
            break
        module = inner
    return module


@dataclass(frozen=True)
class ForwardArguments:
    """Holds the positions of arguments, read once: Dynamo cannot trace inspect.signature."""

    positions: Mapping[str, int]

    @classmethod
    def of(cls, module: nn.Module) -> ForwardArguments:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        named = [item.name for item in parameters if item.kind not in _ANY_ARGUMENTS]
        return cls({name: index for index, name in enumerate(named)})

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the value passed, or None if it was omitted."""
        if name in kwargs:
            return kwargs[name]
        position = self.positions[name]
        return args[position] if position < len(args) else None

    def replace(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallArguments:
        if name in kwargs:
            return args, {**kwargs, name: value}
        position = self.positions[name]
        return (*args[:position], value, *args[position + 1 :]), kwargs
