# SPDX-License-Identifier: Apache-2.0
"""Flags, times and checks that the example scripts have in common; nothing of it is cocodiff's."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

LARGEST_DISTANCE = 1e-3
"""The largest distance from the uncompiled model, where values are in 0..1: Inductor rounds."""


def flags(text: str | None, steps: int = 28) -> argparse.ArgumentParser:
    """Returns a parser of what all examples can be told; `text` is the docstring of the script."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny, random weights, on CPU")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--out", type=Path, help="save what was drawn to this file")
    parser.add_argument(
        "--backend", default="cocodiff", help="or cocodiff_eager: no generated code"
    )
    return parser


class StepTimes:
    """Notes when each step ends; diffusers calls it as `callback_on_step_end`."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def __call__(
        self, _pipe: Any = None, _step: int = 0, _time: Any = None, kept: Any = None
    ) -> Any:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())
        return kept or {}

    def __str__(self) -> str:
        first, *later = (end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False))
        mean = f", then {sum(later) / len(later):.4f} s per step" if later else ""
        return f"the first step took {first:.2f} s, compiling included{mean}"


def report(drawn: Any, expected: Any | None, times: StepTimes, graphs: Sequence[Any]) -> None:
    """Prints on the first rank what came out; ends the script if it is wrong.

    `drawn` and `expected` are arrays or tensors of values in 0..1, `graphs` is what
    `cocodiff_compile.collect_reports` collected.
    """
    sites = sum(len(graph.summary["sites"]) for graph in graphs)
    among = f"among {dist.get_world_size()} ranks"
    say(f"{sites} attentions exchange {among}, graphs compiled: {len(graphs)}")
    say(str(times))
    if is_checked(drawn) and expected is not None:
        distance = float((torch.as_tensor(drawn) - torch.as_tensor(expected)).abs().max())
        say(f"distance from uncompiled: {distance:.1e} of 1 at most")
        if not distance <= LARGEST_DISTANCE:
            raise SystemExit(f"that is more than {LARGEST_DISTANCE}")


def say(line: str) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def is_checked(values: Any) -> bool:
    """Ends the script unless every rank has the same bits. Returns False if there is nothing to
    check: `cocodiff explain` runs scripts without computing or exchanging anything.
    """
    if dist.get_backend() == "fake":
        say("a dry run: nothing was computed, and nothing is checked")
        return False
    mine = torch.as_tensor(values).contiguous()
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    if not all(torch.equal(other, mine) for other in others):
        raise SystemExit("the ranks do not agree")
    say("the ranks agree, bit for bit")
    return True


def save(frames: Any, out: Path | None) -> None:
    """Writes frames [number, height, width, 3] in 0..1 on the first rank: one as a picture, several
    as an animation (.gif). Needs pillow, which diffusers installs.
    """
    if out is None or dist.get_rank():
        return
    from PIL import Image  # noqa: PLC0415  (optional)

    _, height, width, _ = frames.shape
    pixels = (255 * torch.as_tensor(frames)).round().to(torch.uint8).flatten(1)
    first, *others = (Image.frombytes("RGB", (width, height), bytes(f.tolist())) for f in pixels)
    more = {"save_all": True, "append_images": others, "duration": 60, "loop": 0} if others else {}
    first.save(out, **more)
    print(f"written: {out}")
