"""What one rank computes with, and how long a kernel takes on it."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    start_s: float = 0.0
    """How long an exchange, of however few bytes, keeps a rank from computing."""

    def shared(self, share: float, start_s: float) -> Device:
        """This, with a share of the time of what computes, and exchanges that take of it too."""
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
        """Of a kernel with so much arithmetic and memory traffic: a roofline."""
        return max(arithmetic_s, self.memory_seconds(size_bytes), self.launch_s)

    def memory_seconds(self, size_bytes: float) -> float:
        return size_bytes / (self.memory_bytes_per_s * self.memory_efficiency)
