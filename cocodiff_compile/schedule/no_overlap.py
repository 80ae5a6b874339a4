"""Settings under which an exchange blocks the rank that starts it: nothing can hide behind it."""

from __future__ import annotations

import os

_BLOCKING = (
    "CCL_OP_SYNC",
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_XCCL_BLOCKING_WAIT",
)


def why_no_overlap() -> str:
    """The setting, and what it does; empty if there is none."""
    for name in _BLOCKING:
        if os.environ.get(name, "0") not in ("", "0"):
            return (
                f"{name}={os.environ[name]} makes every exchange block its rank, nothing can hide "
                "behind it: schedule-v-first and automatic head chunks are left out; unset it"
            )
    return ""
