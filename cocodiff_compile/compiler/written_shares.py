# SPDX-License-Identifier: Apache-2.0
"""Refuses blocks that write to a share they are given.

The caller of a block would see what it writes to its input. Where the input is a share, the block
writes to a copy that was gathered, which nobody else sees. So Dynamo's graph, in which such writes
still stand as the model has them, is run once without values, and every op that writes is asked
for the memory it writes to, whatever view of the input it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from cocodiff_compile.compat import FakeTensorMode, ShapeEnv, TorchDispatchMode
from cocodiff_compile.errors import UserError
from cocodiff_compile.shard.mutable_ops import written_by
from cocodiff_compile.shard.token_share import TokenShare

_WRITES = (
    "option 'shard': a compiled block writes to its input in place, of which each rank holds a "
    "share only; write x = x + y instead of x += y, or compile the model as a whole"
)


def refuse_written_shares(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Raises UserError if a graph of Dynamo writes to an input that is a share, or to a view of
    it.
    """
    if not any(isinstance(value, TokenShare) for value in inputs):
        return
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad():
        fakes = [_fake(value, fake_mode) for value in inputs]
        pairs = zip(fakes, inputs, strict=True)
        shared = [fake for fake, value in pairs if isinstance(value, TokenShare)]
        with fake_mode, _RefuseWrites(shared):
            gm.forward(*fakes)


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, TokenShare):
        with mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


class _RefuseWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises UserError where an op writes to the memory of a tensor that is a share."""

    supports_higher_order_operators = True

    def __init__(self, shared: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = {_memory_of(tensor) for tensor in shared}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        written = written_by(func, args, kwargs or {})
        if any(_memory_of(tensor) in self._memory for tensor in written):
            raise UserError(_WRITES)
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
