# SPDX-License-Identifier: Apache-2.0
"""Compiles without generating code and without computing: for `explain`, and for whole scripts.

What stands in for a compiled graph returns zeros of the right shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from cocodiff_compile.compat import FakeTensorMode, ShapeEnv, make_boxed_func

_blocks: list[object] = []
"""The `dry_run` blocks that are open in this process."""


@contextmanager
def dry_run() -> Iterator[None]:
    """A context in which our backends run every pass and generate no code, in every thread."""
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()


def is_dry_run() -> bool:
    """Returns whether a `dry_run` block is open."""
    return bool(_blocks)


def stand_in(gm: GraphModule, _example_inputs: Sequence[Any], **_options: Any) -> Any:
    """Returns a callable with the graph's signature that returns zeros instead of computing."""
    results: dict[tuple[Any, ...], Any] = {}

    def call(*args: Any) -> Any:
        sizes = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args)
        if sizes not in results:
            results[sizes] = _shapes_of_results(gm, args)
        return pytree.tree_map_only(torch.Tensor, _zeros, results[sizes])

    return make_boxed_func(call)


def _shapes_of_results(gm: GraphModule, args: Sequence[Any]) -> Any:
    # Loops need symbols for what they do not know, sizes of inputs are known.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    fake_args = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
    with mode:
        return gm.forward(*fake_args)


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
