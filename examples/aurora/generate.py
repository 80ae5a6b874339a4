# SPDX-License-Identifier: Apache-2.0
"""One picture of a text-to-image pipeline on all ranks, and the seconds it took.

mpiexec -n 12 python examples/aurora/generate.py Qwen/Qwen-Image --backend cocodiff

Needs weights and accelerators: never run by this project. `examples/image.py --tiny` makes the same
calls on CPU, with tiny random weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from diffusers import ContextParallelConfig, DiffusionPipeline
from torch import distributed as dist

import cocodiff_compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--backend", choices=("cocodiff", "inductor", "none"), default="cocodiff")
    parser.add_argument("--prompt", default="a lighthouse at dusk, oil on canvas")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3, help="the first one compiles")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()

    device = cocodiff_compile.init_distributed()
    pipe = DiffusionPipeline.from_pretrained(given.weights, torch_dtype=torch.bfloat16).to(device)
    if given.backend == "cocodiff":
        pipe.transformer = torch.compile(
            pipe.transformer, backend="cocodiff", dynamic=False, options={"shard": "tokens"}
        )
    else:  # diffusers' own Ulysses, for the classes that have it
        ulysses = ContextParallelConfig(ulysses_degree=dist.get_world_size())
        pipe.transformer.enable_parallelism(config=ulysses)
        if given.backend == "inductor":
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, dynamic=False)
    for run in range(given.runs):
        begin = time.perf_counter()
        picture = pipe(
            given.prompt,
            height=given.resolution,
            width=given.resolution,
            num_inference_steps=given.steps,
            generator=torch.Generator().manual_seed(0),  # the same noise on every rank
        ).images[0]
        if dist.get_rank() == 0:
            print(f"{given.backend}, run {run}: {time.perf_counter() - begin:.2f} s", flush=True)
    if dist.get_rank() == 0:
        picture.save(given.out / f"{Path(given.weights).name}-{given.backend}.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
