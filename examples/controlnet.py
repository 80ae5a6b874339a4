# SPDX-License-Identifier: Apache-2.0
"""Draws a picture with FLUX along the edges of another one, by a ControlNet.

    torchrun --nproc-per-node 4 examples/controlnet.py --edges canny.png --out picture.png
    torchrun --nproc-per-node 2 examples/controlnet.py --tiny

The public weights are loaded by name, and each rank takes its accelerator: never run by this
project. With --tiny the same pipeline has tiny parts with random weights, runs on CPU, and is
compared with itself uncompiled.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxControlNetModel, FluxControlNetPipeline
from diffusers.utils import load_image
from shared import StepTimes, flags, report, save
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.tiny_pipelines import call_arguments, tiny_pipeline

WEIGHTS = "black-forest-labs/FLUX.1-dev"
CONTROLNET = "InstantX/FLUX.1-dev-Controlnet-Canny"


def load() -> Any:
    controlnet = FluxControlNetModel.from_pretrained(CONTROLNET, torch_dtype=torch.bfloat16)
    return FluxControlNetPipeline.from_pretrained(
        WEIGHTS, controlnet=controlnet, torch_dtype=torch.bfloat16
    )


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--prompt", default="a lighthouse at dusk, oil on canvas")
    parser.add_argument(
        "--edges", help="the picture whose edges are followed: a file or an address"
    )
    given = parser.parse_args()
    if not (given.tiny or given.edges):
        parser.error("--edges is needed, unless --tiny is given")

    # 1. Every rank loads the whole pipeline.
    device = cocodiff_compile.init_distributed(device="cpu" if given.tiny else None)
    pipe = tiny_pipeline("flux controlnet") if given.tiny else load().to(device)

    def draw(**more: Any) -> Any:
        if given.tiny:  # instead of prompt and edges there are random tensors
            call = call_arguments("flux controlnet", given.steps, output_type="np")
        else:
            noise = torch.Generator().manual_seed(0)  # the same on every rank
            call = {"prompt": given.prompt, "generator": noise, "output_type": "np"}
            call.update(control_image=load_image(given.edges), num_inference_steps=given.steps)
        return pipe(**call, **more).images

    # 2. Both models are compiled in place, the pipeline keeps the objects that it has. So small
    # models gain nothing, and are shared out only if told that this does not matter.
    expected = draw() if given.tiny else None
    options = {"shard": {"min_gain": 0} if given.tiny else "tokens"}
    for model in (pipe.controlnet, pipe.transformer):
        model.compile(backend=given.backend, dynamic=False, options=options)

    # 3. Every rank makes the same call, and gets the same picture.
    times = StepTimes()
    with cocodiff_compile.collect_reports() as graphs:
        pictures = draw(callback_on_step_end=times)
    report(pictures, expected, times, graphs)
    save(pictures, given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
