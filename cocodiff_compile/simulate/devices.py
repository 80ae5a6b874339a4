"""What one rank computes with. Speeds are published; efficiencies are assumptions, fitted to
nothing.
"""

from __future__ import annotations

from cocodiff_compile.errors import UserError
from cocodiff_compile.schedule.device import Device

MICROSECOND = 1e-6


# 256 TFLOP/s is what a bf16 GEMM reaches on a tile, no peak; models reach a part of it.
AURORA_TILE = Device(
    "aurora-tile",
    256e12,
    1e12,
    matmul_efficiency=0.8,
    attention_efficiency=0.5,
    memory_efficiency=0.8,
    launch_s=5 * MICROSECOND,
)
# Peaks of the SXM data sheet: bf16 without sparsity, HBM3.
H100 = Device(
    "h100",
    989e12,
    3.35e12,
    matmul_efficiency=0.6,
    attention_efficiency=0.5,
    memory_efficiency=0.8,
    launch_s=3 * MICROSECOND,
)

DEVICES = {device.name: device for device in (AURORA_TILE, H100)}


def device_for(name: str | None, topology_source: str) -> Device:
    """The device asked for, else the tile for `aurora` and the H100 for everything else."""
    if name is None:
        return AURORA_TILE if topology_source == "aurora" else H100
    if name not in DEVICES:
        raise UserError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]
