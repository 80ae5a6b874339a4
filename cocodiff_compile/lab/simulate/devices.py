"""The devices that a rank may compute with. Speeds are published; efficiencies are assumptions,
fitted to nothing.
"""

from __future__ import annotations

from cocodiff_compile.devices.cuda import H100
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.xpu import AURORA_TILE
from cocodiff_compile.errors import UserError

DEVICES = {device.name: device for device in (AURORA_TILE, H100)}


def device_for(name: str | None, topology_source: str) -> Device:
    """Returns the device asked for, else the tile for `aurora` and the H100 for everything else."""
    if name is None:
        return AURORA_TILE if topology_source == "aurora" else H100
    if name not in DEVICES:
        raise UserError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[name]
