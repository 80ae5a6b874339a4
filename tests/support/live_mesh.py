"""One mesh for all models of a test's ranks: making its groups takes longer than a small model."""

from __future__ import annotations

import functools
from typing import TypeVar

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cocodiff_compile.parallel import parallelize

ModelT = TypeVar("ModelT", bound=nn.Module)


@functools.cache
def _mesh(num_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("ring", "ulysses"))


def parallelize_live(model: ModelT) -> ModelT:
    """`parallelize` over all live ranks of this process."""
    return parallelize(model, mesh=_mesh(dist.get_world_size()))
