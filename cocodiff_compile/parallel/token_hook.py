"""A hook of a module itself, not of its `forward`.

It stays outermost when a cache of diffusers wraps `forward` later, and it stays when accelerate
puts back the `forward` that it found.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class TokenHook:
    """What is done with a module's inputs and outputs; by default nothing."""

    def pre_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def post_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return output

    def attach(self, module: nn.Module) -> tuple[RemovableHandle, ...]:
        """Run around every call of `module`; hooks attached later run further in."""
        handles: list[RemovableHandle] = []
        if type(self).pre_forward is not TokenHook.pre_forward:
            handles.append(module.register_forward_pre_hook(self.pre_forward, with_kwargs=True))
        if type(self).post_forward is not TokenHook.post_forward:
            handles.append(module.register_forward_hook(self.post_forward))
        return tuple(handles)
