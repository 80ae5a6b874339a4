# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a kernel takes on the device of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """Holds published rates of arithmetic and of memory, and the share of them that is reached."""

    name: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    launch_s: float
    """The shortest time that a kernel takes."""
    start_s: float = 0.0
    """How long starting an exchange, of however few bytes, keeps a rank from computing."""

    def shared(self, share: float, start_s: float) -> Device:
        """Returns a device that gets a share of the time, and spends some on starting exchanges."""
        return replace(
            self,
            matmul_flops_per_s=share * self.matmul_flops_per_s,
            memory_bytes_per_s=share * self.memory_bytes_per_s,
            launch_s=self.launch_s / share,
            start_s=start_s / share,
        )

    def matmul_seconds(self, flops: float) -> float:
        return flops / (self.matmul_flops_per_s * self.matmul_efficiency)

    def attention_seconds(self, flops: float) -> float:
        return flops / (self.matmul_flops_per_s * self.attention_efficiency)

    def kernel_seconds(self, arithmetic_s: float, size_bytes: float) -> float:
        """Returns the seconds of a kernel by a roofline of its arithmetic and memory traffic."""
        return max(arithmetic_s, self.memory_seconds(size_bytes), self.launch_s)

    def memory_seconds(self, size_bytes: float) -> float:
        return size_bytes / (self.memory_bytes_per_s * self.memory_efficiency)
