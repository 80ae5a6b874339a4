# SPDX-License-Identifier: Apache-2.0
"""Finds the model that a compiled block is called in, and ends its shares where its call ends.

Blocks that are compiled one by one hand shares to each other (`shard/token_share.py`). What leaves
the model should be no share: its caller need not read it on every rank. So the model gets a hook
that gathers what it returns. Its first call has begun before, without a hook: in that one, blocks
hand wholes to each other.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakSet

import torch.utils._pytree as pytree
from torch import nn

from cocodiff_compile.compat import not_captured
from cocodiff_compile.shard.model_calls import enter, is_gathered_behind, leave, module_calls
from cocodiff_compile.shard.token_share import TokenShare

_hooked: WeakSet[nn.Module] = WeakSet()


def enclosing_module() -> nn.Module | None:
    """Returns the outermost module that is being called, if it calls another one that is compiled
    now; None if that is the compiled one itself.
    """
    called = [frame.f_locals["self"] for frame in module_calls()]
    plain = [getattr(module, "_orig_mod", module) for module in called]
    return called[-1] if called and plain[-1] is not plain[0] else None


def is_inside_a_model() -> bool:
    """Returns whether a block is called by a model, which from its next call on gathers the shares
    that it returns.
    """
    if is_gathered_behind():
        return True
    model = enclosing_module()
    if model is not None and model not in _hooked:
        model.register_forward_pre_hook(_enter)
        model.register_forward_hook(_leave, always_call=True)
        _hooked.add(model)
    return model is not None


@not_captured
def _enter(model: nn.Module, _inputs: Any) -> None:
    enter(model)


@not_captured
def _leave(model: nn.Module, _inputs: Any, output: Any) -> Any:
    wholes = with_wholes(output)
    leave(model)
    return wholes


def with_wholes(output: Any) -> Any:
    """Returns what a model returns with wholes in place of shares; those in fields of dataclasses
    are replaced there. What holds no share is the same object as before.
    """
    items, spec = pytree.tree_flatten(output, is_leaf=lambda item: item is not output)
    if spec.is_leaf():
        return _whole_leaf(output)
    wholes = [with_wholes(item) for item in items]
    is_as_before = all(whole is item for whole, item in zip(wholes, items, strict=True))
    return output if is_as_before else pytree.tree_unflatten(wholes, spec)


def _whole_leaf(leaf: Any) -> Any:
    if isinstance(leaf, TokenShare):
        return leaf.whole()
    if is_dataclass(leaf) and not isinstance(leaf, type):
        for name in [field.name for field in fields(leaf)]:
            value = getattr(leaf, name, None)
            if (wholes := with_wholes(value)) is not value:
                object.__setattr__(leaf, name, wholes)
    return leaf
