# SPDX-License-Identifier: Apache-2.0
"""Describes Intel GPUs over torch's own xccl, or the legacy oneCCL bindings where they fit this
torch.

It was never run: all figures are from documentation and source (docs/xpu.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.installed import why_not_legacy
from cocodiff_compile.devices.kind import DeviceKind, MachineKind, Transport, why_not_built_in
from cocodiff_compile.topology.presets import GB, MICROSECOND, SLINGSHOT, TILE, XE_LINK

# 256 TFLOP/s is what a bf16 GEMM reaches on a tile, no peak; models reach a part of it.
# Efficiencies are assumptions.
AURORA_TILE = Device(
    "aurora-tile",
    256e12,
    1e12,
    matmul_efficiency=0.8,
    attention_efficiency=0.5,
    memory_efficiency=0.8,
    launch_s=5 * MICROSECOND,
)


def _card(properties: Any) -> str:
    """Returns the id that tiles of a card share. Intel's driver puts vendor, product and PCI
    address first in the uuid, and the tile into the last byte.
    """
    data = bytes(getattr(properties.uuid, "bytes", properties.uuid))
    return data[:-1].hex() if any(data) else ""


XPU = DeviceKind(
    name="xpu",
    transports=(
        Transport("xccl", why_not_built_in("xccl")),
        Transport(
            "ccl",
            partial(why_not_legacy, "oneccl-bind-pt"),
            legacy_packages=("intel-extension-for-pytorch", "oneccl-bind-pt"),
        ),
        Transport(
            "gloo",
            why_not_built_in("gloo"),
            on_request="it takes no XPU tensors, every exchange is copied through the host",
        ),
    ),
    remedies=(
        "install a torch for XPU with xccl (2.8 or later, from the xpu index of "
        "download.pytorch.org), or the oneccl-bind-pt of torch's own major.minor version"
    ),
    guess=Device("xpu, a guess", 300e12, 1.5e12, 0.6, 0.5, 0.8, 5 * MICROSECOND),
    machine=MachineKind("gpu", TILE, XE_LINK, SLINGSHOT, 1000 * GB),
    parts={"Data Center GPU Max": AURORA_TILE},
    blocking_variables=("CCL_OP_SYNC", "TORCH_XCCL_BLOCKING_WAIT"),
    # These passes of Inductor know what collectives take on NVIDIA's links only.
    inductor_settings={
        "reorder_for_compute_comm_overlap": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
    },
    triton="intel",
    card_of=_card,
    too_few=(
        ", or set ZE_FLAT_DEVICE_HIERARCHY=FLAT, under which every tile is a device, and look at "
        "ZE_AFFINITY_MASK"
    ),
)
