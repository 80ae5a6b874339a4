# SPDX-License-Identifier: Apache-2.0
"""Turns on diffusers' own Ulysses, to compare with and to compile what exchanges tokens already."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def has_ulysses(model_class: type[nn.Module]) -> bool:
    """Returns whether diffusers has a plan for this class."""
    return getattr(model_class, "_cp_plan", None) is not None


def enable_ulysses(model: nn.Module) -> nn.Module:
    """Turns Ulysses on over all ranks, which all call this, in place."""
    from diffusers import ContextParallelConfig  # noqa: PLC0415  (slow, and optional)

    # diffusers 0.42 calls this where a plan splits arguments it has to look for, as Wan's does.
    if not hasattr(logging.Logger, "warning_once"):
        setattr(logging.Logger, "warning_once", logging.Logger.warning)  # noqa: B010
    config = ContextParallelConfig(ulysses_degree=torch.distributed.get_world_size())
    with at_least_one_device():
        model.enable_parallelism(config=config)  # type: ignore[operator]
    return model


@contextmanager
def at_least_one_device() -> Iterator[None]:
    """Makes torch report at least one accelerator, since diffusers divides by their number."""
    device_count = torch.accelerator.device_count
    if device_count() > 0:
        yield
        return
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = device_count
