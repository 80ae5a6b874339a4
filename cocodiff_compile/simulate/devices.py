"""What one rank computes with. Speeds are published; efficiencies are assumptions, fitted to
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff_compile.errors import UserError

MICROSECOND = 1e-6


@dataclass(frozen=True)
class Device:
    """`matmul_flops_per_s` and `memory_bytes_per_s` as published, and the share that is reached."""

    name: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    launch_s: float
    """The shortest a kernel takes."""

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.matmul_flops_per_s * self.matmul_efficiency)

    def attention_seconds(self, flops: float) -> float:
        return flops / (self.matmul_flops_per_s * self.attention_efficiency)

    def memory_seconds(self, size_bytes: float) -> float:
        return size_bytes / (self.memory_bytes_per_s * self.memory_efficiency)


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
