# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff_compile.init_distributed()`: joins the process group of all ranks under any
launcher.

It is optional: a program may call torch.distributed.init_process_group instead.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from importlib import import_module

import torch
from torch import distributed as dist

from cocodiff_compile.devices.choose import choose_device, choose_transport
from cocodiff_compile.devices.host_staged import stage_through_host
from cocodiff_compile.devices.installed import (
    LEGACY_PACKAGES,
    Installed,
    installed_here,
    why_not_legacy,
)
from cocodiff_compile.devices.kind import DeviceKind, Transport
from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.launch.launchers import (
    RANK_VARIABLES,
    adopt_launcher,
    find_launch,
    local_rank_of,
)
from cocodiff_compile.say_once import say_once

log = logging.getLogger(__name__)


def init_distributed(
    backend: str | None = None, device: str | None = None, timeout: timedelta | None = None
) -> torch.device:
    """Joins the ranks that torchrun, mpiexec or srun started. Returns this rank's device, which it
    makes the current one.

    `device` is cpu, cuda or xpu; by default the first accelerator there is. `backend` is the
    process-group backend; by default the usual one of the device, or COCODIFF_TRANSPORT. An
    existing process group is kept.
    """
    if dist.is_initialized():
        return take_device(device)
    if adopt_launcher(os.environ) is None:
        raise UserError(
            "no launcher started this process as a rank: start it with torchrun "
            f"--nproc-per-node N, mpiexec -n N or srun -n N, or set {', '.join(RANK_VARIABLES)}"
        )
    taken = take_device(device)
    join_ranks(backend, device, timeout)
    return taken


def take_device(asked: str | None = None) -> torch.device:
    """Returns this rank's device, by its local rank, and makes an accelerator the current one."""
    device = rank_device(asked)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def rank_device(asked: str | None = None) -> torch.device:
    """Returns this rank's device, by its local rank."""
    installed = installed_here()
    kind = choose_device(installed, asked)
    if kind.name == "cpu":
        return torch.device("cpu")
    launch = find_launch(os.environ)
    local_rank = launch.local_rank if launch else local_rank_of(os.environ)
    return torch.device(kind.name, kind.index_of(local_rank, installed.device_counts[kind.name]))


def join_ranks(
    backend: str | None = None,
    device: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    num_ranks: int = -1,
) -> None:
    """Calls init_process_group with the transport of the device; the rest is passed on."""
    installed = installed_here()
    kind = choose_device(installed, device)
    transport = choose_transport(kind, installed, backend)
    import_legacy(transport, installed)
    if transport.on_request:
        say_once(log, logging.WARNING, f"{transport.name}: {transport.on_request}")
        stage_through_host(kind.name)
    name = group_backend(kind, transport, installed)
    log.debug("ranks of %s talk over %s", kind.name, name)
    if reason := kind.why_no_overlap():
        log.debug("%s", reason)
    dist.init_process_group(
        name, init_method=init_method, timeout=timeout, rank=rank, world_size=num_ranks
    )


def group_backend(kind: DeviceKind, chosen: Transport, installed: Installed) -> str:
    """Returns the `backend` argument of init_process_group, with gloo for tensors of the host."""
    if chosen.name == "gloo":
        return "gloo"
    own = f"{kind.name}:{chosen.name}"
    return f"cpu:gloo,{own}" if "gloo" in installed.built_in else own


def import_legacy(transport: Transport, installed: Installed) -> None:
    """Imports the legacy packages that fit this torch. The package that registers the backend fits,
    or the transport would not have been chosen.
    """
    for package in transport.legacy_packages:
        if not why_not_legacy(package, installed):
            import_module(LEGACY_PACKAGES[package])
