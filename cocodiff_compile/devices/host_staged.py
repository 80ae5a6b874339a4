# SPDX-License-Identifier: Apache-2.0
"""Runs collectives over gloo for tensors of a device that gloo does not support.

It serves machines whose device has no transport of its own, and only on request: a collective waits
for the device, copies to the host, waits for its own end, and copies back, so that nothing overlaps
with it. It replaces functional collectives only, which is what graphs contain. It was never run on
such a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_OPS = ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")


@cache
def stage_through_host(device_type: str) -> torch.library.Library:
    """Registers the staged collectives for a device type, for the rest of this process."""
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for name in _OPS:
        op = getattr(torch.ops._c10d_functional, name).default
        library.impl(name, staged(op), device_type.upper())  # type: ignore[no-untyped-call]
    return library


def staged(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the collective `op` on a copy on the host; its result is complete when it returns."""

    def call(source: Tensor, *args: Any) -> Tensor:
        sent = op(source.cpu(), *args)
        received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
        return received.to(source.device)

    return call
