"""Finds the model that a compiled block is called in, and ends its shares where its call ends.

Blocks that are compiled one by one hand shares to each other (`shard/token_share.py`). What leaves
the model should be no share: its caller need not read it on every rank. So the model gets a hook
that gathers what it returns. Its first call has begun before, without a hook: in that one, blocks
hand wholes to each other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch.utils._pytree as pytree
from torch import nn

from cocodiff_compile.compat import not_captured
from cocodiff_compile.shard.token_share import TokenShare


class _Calls(threading.local):
    """Counts the calls of models with a hook in this thread."""

    begun = 0
    depth = 0
    """How many of them are under way."""


_calls = _Calls()
_hooked: WeakSet[nn.Module] = WeakSet()


def enclosing_module() -> nn.Module | None:
    """Returns the outermost module that is being called, if it calls another one that is compiled
    now; None if that is the compiled one itself.
    """
    called = list(_called_modules())
    plain = [getattr(module, "_orig_mod", module) for module in called]
    return called[-1] if called and plain[-1] is not plain[0] else None


def _called_modules() -> Iterator[nn.Module]:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]


def begun_calls() -> int:
    """Returns how many calls of models with a hook have begun: the same on all ranks that run the
    same program.
    """
    return _calls.begun


def is_gathered_behind() -> bool:
    """Returns whether a model that is being called gathers the shares that it returns."""
    return _calls.depth > 0


@contextmanager
def as_in_later_calls() -> Iterator[None]:
    """A context in which shares are handed on as in every call of a model but its first."""
    _calls.depth += 1
    try:
        yield
    finally:
        _calls.depth -= 1


def is_inside_a_model() -> bool:
    """Returns whether a block is called by a model, which from its next call on gathers the shares
    that it returns.
    """
    if _calls.depth:
        return True
    model = enclosing_module()
    if model is not None and model not in _hooked:
        model.register_forward_pre_hook(_enter)
        model.register_forward_hook(_leave, always_call=True)
        _hooked.add(model)
    return model is not None


@not_captured
def _enter(_model: nn.Module, _inputs: Any) -> None:
    _calls.begun += 1
    _calls.depth += 1


@not_captured
def _leave(_model: nn.Module, _inputs: Any, output: Any) -> Any:
    _calls.depth -= 1
    return pytree.tree_map_only(TokenShare, TokenShare.whole, output)
