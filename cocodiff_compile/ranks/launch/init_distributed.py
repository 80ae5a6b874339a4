"""`cocodiff_compile.init_distributed()`: the process group of all ranks, under any launcher.

Optional: who calls torch.distributed.init_process_group needs none of this.
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
    backend: str | None = None,
    device: str | None = None,
    timeout: timedelta | None = None,
) -> torch.device:
    """Joins the ranks that torchrun, mpiexec or srun started; this rank's device, made current.

    `device`: cpu, cuda or xpu, if not the first accelerator there is. `backend`: what ranks talk
    over, if not what is usual there; also COCODIFF_TRANSPORT. A group that exists is kept.
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
    """This rank's device, by its local rank; an accelerator becomes the current one."""
    device = rank_device(asked)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def rank_device(asked: str | None = None) -> torch.device:
    """This rank's device, by its local rank."""
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
    """init_process_group with what is chosen for the device; other arguments as there."""
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
    """What init_process_group is told: tensors of the host go over gloo."""
    if chosen.name == "gloo":
        return "gloo"
    own = f"{kind.name}:{chosen.name}"
    return f"cpu:gloo,{own}" if "gloo" in installed.built_in else own


def import_legacy(transport: Transport, installed: Installed) -> None:
    """What fits this torch; the package that registers the backend does, or was not chosen."""
    for package in transport.legacy_packages:
        if not why_not_legacy(package, installed):
            import_module(LEGACY_PACKAGES[package])
