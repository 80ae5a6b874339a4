"""Find and replace an argument of a module's forward by name, however it was passed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ForwardArguments:
    """Positions are read once: Dynamo cannot trace inspect.signature of every forward."""

    positions: Mapping[str, int]

    @classmethod
    def of(cls, module: nn.Module) -> ForwardArguments:
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        return cls({name: index for index, name in enumerate(parameters)})

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value passed, or None if it was left out."""
        if name in kwargs:
            return kwargs[name]
        position = self.positions[name]
        return args[position] if position < len(args) else None

    def replace(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name in kwargs:
            return args, {**kwargs, name: value}
        position = self.positions[name]
        return (*args[:position], value, *args[position + 1 :]), kwargs
