"""Determines the Ulysses degree and makes the device mesh that diffusers needs for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def resolve_degree(ulysses_degree: int | None, mesh: DeviceMesh | None) -> int:
    """Returns the degree by number, mesh or default. Raises ValueError if no group can have it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "The process group is not initialised: call torch.distributed.init_process_group() on "
            "every rank (torchrun sets what it needs) before parallelize()."
        )
    degree = _degree_of_mesh(mesh) if mesh is not None else ulysses_degree
    if mesh is not None and ulysses_degree not in (None, degree):
        raise ValueError(
            f"ulysses_degree={ulysses_degree}, but the mesh's 'ulysses' dim has size {degree}: "
            "pass one of the two, or make them equal."
        )
    return _check_degree(dist.get_world_size() if degree is None else degree)


def make_mesh(model: nn.Module, degree: int) -> DeviceMesh:
    """Returns a mesh whose Ulysses groups are neighbouring ranks, all of which call this."""
    device_type = next(model.parameters()).device.type
    shape = (dist.get_world_size() // degree, 1, degree)
    names = ("data", "ring", "ulysses")
    return init_device_mesh(
        "cpu" if device_type == "meta" else device_type, shape, mesh_dim_names=names
    )


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


def _degree_of_mesh(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    if "ulysses" not in names or "ring" not in names:
        raise ValueError(
            f"The mesh has the dims {names}, but diffusers needs 'ring' and 'ulysses': "
            "init_device_mesh(device_type, (1, degree), mesh_dim_names=('ring', 'ulysses'))."
        )
    if mesh["ring"].size() != 1:
        raise ValueError(
            f"The mesh's 'ring' dim has size {mesh['ring'].size()}: ring attention is not "
            "supported, make it 1."
        )
    return mesh["ulysses"].size()


def _check_degree(degree: int) -> int:
    world_size = dist.get_world_size()
    if degree == 1:
        raise ValueError(
            "A Ulysses degree of 1 leaves nothing to parallelise: use the model as it is, or start "
            "more ranks."
        )
    if degree < 1 or degree > world_size or world_size % degree:
        raise ValueError(
            f"A Ulysses degree of {degree} does not divide the world of {world_size} ranks: choose "
            f"one of {[d for d in range(2, world_size + 1) if world_size % d == 0]}, or start "
            "another number of ranks."
        )
    return degree
