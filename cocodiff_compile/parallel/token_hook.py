"""Runs hooks around a module's `forward`, outermost, whatever else wraps or restores it.

A cache of diffusers that is enabled later wraps `forward` again, and must see this rank's share of
the tokens; accelerate restores the `forward` that it found. Both are detected before the next call,
and `forward` is wrapped once more. A wrapper that is no longer outermost is switched off rather
than removed, since something else may hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn

CallArguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
"""The positional and the named arguments of a call."""


class TokenHook:
    """Defines what happens to a module's inputs and outputs; by default nothing."""

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        return output


KeyedHook: TypeAlias = "tuple[str, nn.Module, TokenHook]"
"""A hook with its key, and the module it is on."""


class HookedForward:
    """Wraps a module's `forward` with hooks, the first of them outermost."""

    def __init__(self, module: nn.Module, hooks: Sequence[TokenHook]) -> None:
        self.is_on = True
        self._hooks = tuple(hooks)
        # Named as the module names it: Dynamo's names of what is inside hold this one.
        self.forward: Callable[..., Any] = module.forward
        self._outer = functools.update_wrapper(functools.partial(_run, self), self.forward)
        module.forward = self._outer

    def is_outermost(self, module: nn.Module) -> bool:
        return module.__dict__.get("forward") is self._outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.forward(*args, **kwargs)
        for hook in self._hooks:
            args, kwargs = hook.pre_forward(args, kwargs)
        output = self.forward(*args, **kwargs)
        for hook in reversed(self._hooks):
            output = hook.post_forward(output)
        return output


def _run(forward: HookedForward, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class HookedModules:
    """Manages the hooks on the modules of a model."""

    def __init__(self) -> None:
        self._forwards: list[tuple[nn.Module, tuple[str, ...], HookedForward]] = []

    def hook(self, wanted: Sequence[KeyedHook]) -> None:
        """Makes the hooks `wanted` run, in this order, and no others.

        A hook is identified by its key: one with the same key on the same module is kept.
        """
        modules = list(dict.fromkeys(module for _, module, _ in wanted))
        for _, _, forward in self._forwards:
            forward.is_on = False
        for module in modules:
            hooks = {key: hook for key, hooked, hook in wanted if hooked is module}
            self._outermost(module, hooks).is_on = True

    def _outermost(self, module: nn.Module, hooks: dict[str, TokenHook]) -> HookedForward:
        for hooked, keys, forward in self._forwards:
            if hooked is module and keys == tuple(hooks) and forward.is_outermost(module):
                return forward
        forward = HookedForward(module, list(hooks.values()))
        self._forwards.append((module, tuple(hooks), forward))
        return forward
