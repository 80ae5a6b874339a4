# SPDX-License-Identifier: Apache-2.0
"""Draws a picture with FLUX, Qwen-Image or Stable Diffusion 3, its tokens shared out over ranks.

    torchrun --nproc-per-node 4 examples/image.py --model qwen-image --out lighthouse.png
    torchrun --nproc-per-node 2 examples/image.py --tiny

The public weights are loaded by name, and each rank takes its accelerator: never run by this
project. With --tiny the same pipeline has tiny parts with random weights, runs on CPU, and is
compared with itself uncompiled.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline
from shared import StepTimes, flags, report, save
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.tiny_pipelines import call_arguments, tiny_pipeline

MODELS = {
    "flux": "black-forest-labs/FLUX.1-dev",
    "qwen-image": "Qwen/Qwen-Image",
    "sd3": "stabilityai/stable-diffusion-3-medium-diffusers",
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--prompt", default="a lighthouse at dusk, oil on canvas")
    given = parser.parse_args()

    # 1. Every rank loads the whole pipeline.
    device = cocodiff_compile.init_distributed(device="cpu" if given.tiny else None)
    if given.tiny:
        pipe = tiny_pipeline(given.model)
    else:
        name = MODELS[given.model]
        pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=torch.bfloat16).to(device)

    def draw(**more: Any) -> Any:
        if given.tiny:  # instead of a prompt there are embeddings, which are random
            call = call_arguments(given.model, given.steps, output_type="np")
        else:
            noise = torch.Generator().manual_seed(0)  # the same on every rank
            call = {"prompt": given.prompt, "generator": noise, "output_type": "np"}
            call["num_inference_steps"] = given.steps
        return pipe(**call, **more).images

    # 2. Its transformer is compiled; nothing else changes. So small a model gains nothing, and is
    # shared out only if told that this does not matter.
    expected = draw() if given.tiny else None
    options = {"shard": {"min_gain": 0} if given.tiny else "tokens"}
    pipe.transformer = torch.compile(
        pipe.transformer, backend=given.backend, dynamic=False, options=options
    )

    # 3. Every rank makes the same call, and gets the same picture.
    times = StepTimes()
    with cocodiff_compile.collect_reports() as graphs:
        pictures = draw(callback_on_step_end=times)
    report(pictures, expected, times, graphs)
    save(pictures, given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
