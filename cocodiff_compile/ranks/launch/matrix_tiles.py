"""Matrix tiles (AMX) that a machine announces and cannot run.

On some virtual machines the first bfloat16 matmul dies of an illegal instruction. oneDNN goes by
what the processor announces, unless ONEDNN_MAX_CPU_ISA says otherwise, which it reads once, at its
first matmul.
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
    """Whether tiles are announced, and end a process that multiplies."""
    if not announced_in.exists() or "amx_tile" not in announced_in.read_text():
        return False
    tried = subprocess.run([sys.executable, "-c", multiply], capture_output=True, check=False)
    return tried.returncode < 0


def avoid_broken_tiles(environment: MutableMapping[str, str] = os.environ) -> None:
    """For this process and those it starts. What the environment says already stays."""
    if SETTING not in environment and tiles_are_broken():
        environment[SETTING] = WITHOUT_TILES
