# SPDX-License-Identifier: Apache-2.0
"""Reads from the schema of an op which arguments it writes to, and which of them it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree


def written_by(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Returns the tensors that an op writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = _by_name(schema, args, kwargs)
    named = [item.name for item in schema.arguments if item.alias_info and item.alias_info.is_write]
    leaves = pytree.tree_leaves([given.get(name) for name in named])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def with_own_arguments(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Returns the result of an op with the arguments that it wrote to and returns as they were
    given, in place of what stood for them in the call.
    """
    schema = func._schema  # type: ignore[attr-defined]
    given = _by_name(schema, args, kwargs)
    written = {
        _alias(item): given[item.name]
        for item in schema.arguments
        if item.alias_info and item.alias_info.is_write and item.name in given
    }
    if len(schema.returns) == 1:
        return written.get(_alias(schema.returns[0]), result)
    if not schema.returns:
        return None
    pairs = zip(schema.returns, result, strict=True)
    return tuple(written.get(_alias(item), value) for item, value in pairs)


def changes_shape(func: Callable[..., Any]) -> bool:
    """Returns whether an op changes the shape of its first argument in place."""
    return torch.Tag.inplace_view in getattr(func, "tags", ())


def _by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _alias(item: Any) -> frozenset[str] | None:
    """Returns the name of the memory of an argument or result, as the schema writes it."""
    return frozenset(item.alias_info.before_set) if item.alias_info else None
