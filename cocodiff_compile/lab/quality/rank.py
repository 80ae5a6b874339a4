# SPDX-License-Identifier: Apache-2.0
"""Runs one rank, under torchrun: `python -m cocodiff_compile.lab.quality.rank SETTINGS RESULT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed as dist

from cocodiff_compile.lab.progress import say_from_rank
from cocodiff_compile.lab.quality.ranks import measure_quality
from cocodiff_compile.lab.quality.settings import QualitySettings


def main(arguments: Sequence[str]) -> None:
    settings_file, result_file = map(Path, arguments)
    settings = QualitySettings.from_json(json.loads(settings_file.read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure_quality(settings, say_from_rank)
    if dist.get_rank() == 0:
        torch.save(result, result_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
