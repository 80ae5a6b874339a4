# SPDX-License-Identifier: Apache-2.0
"""Detects matrix tiles (AMX) that a machine announces but cannot run.

On some virtual machines the first bfloat16 matmul ends the process with an illegal instruction.
oneDNN trusts what the processor announces, unless ONEDNN_MAX_CPU_ISA limits it, which oneDNN reads
once, at its first matmul.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

SETTING = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX512_CORE_BF16"
_ANNOUNCED_IN = Path("/proc/cpuinfo")
_MULTIPLY = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


@functools.cache
def tiles_are_broken(announced_in: Path = _ANNOUNCED_IN, multiply: str = _MULTIPLY) -> bool:
    """Returns whether tiles are announced, and end a process that uses them."""
    if not announced_in.exists() or "amx_tile" not in announced_in.read_text():
        return False
    tried = subprocess.run([sys.executable, "-c", multiply], capture_output=True, check=False)
    return tried.returncode < 0


def avoid_broken_tiles(environment: MutableMapping[str, str] = os.environ) -> None:
    """Disables broken tiles for this process and its children. A setting of the user is kept."""
    if SETTING not in environment and tiles_are_broken():
        environment[SETTING] = WITHOUT_TILES
