# SPDX-License-Identifier: Apache-2.0
"""Describes NVIDIA GPUs over NCCL. It was never run: all figures are from documents and source."""

from __future__ import annotations

from typing import Any

from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.kind import DeviceKind, MachineKind, Transport, why_not_built_in
from cocodiff_compile.topology.presets import GB, INFINIBAND, MICROSECOND, NVLINK

# Peaks of the SXM data sheet: bf16 without sparsity, HBM3. Efficiencies are assumptions.
H100 = Device(
    "h100",
    989e12,
    3.35e12,
    matmul_efficiency=0.6,
    attention_efficiency=0.5,
    memory_efficiency=0.8,
    launch_s=3 * MICROSECOND,
)


def _card(properties: Any) -> str:
    return str(properties.uuid)


CUDA = DeviceKind(
    name="cuda",
    transports=(Transport("nccl", why_not_built_in("nccl")),),
    remedies="install a torch with nccl",
    guess=Device("cuda, a guess", 300e12, 1.5e12, 0.6, 0.5, 0.8, 5 * MICROSECOND),
    machine=MachineKind("gpu", NVLINK, NVLINK, INFINIBAND, 3000 * GB),
    parts={"H100": H100},
    blocking_variables=("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"),
    triton="nvidia",
    card_of=_card,
    too_few=", or look at CUDA_VISIBLE_DEVICES",
)
