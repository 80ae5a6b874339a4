# SPDX-License-Identifier: Apache-2.0
"""Makes a video with Wan, its tokens shared out over all ranks.

    torchrun --nproc-per-node 8 examples/video.py --out lighthouse.gif
    torchrun --nproc-per-node 2 examples/video.py --tiny

The public weights are loaded by name, and each rank takes its accelerator: never run by this
project. With --tiny the same pipeline has tiny parts with random weights, runs on CPU, and is
compared with itself uncompiled.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from shared import StepTimes, flags, report, save
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.tiny_pipelines import call_arguments, tiny_pipeline

WEIGHTS = "Wan-AI/Wan2.1-T2V-14B-Diffusers"


def load() -> Any:
    vae = AutoencoderKLWan.from_pretrained(WEIGHTS, subfolder="vae", torch_dtype=torch.float32)
    return WanPipeline.from_pretrained(WEIGHTS, vae=vae, torch_dtype=torch.bfloat16)


def main() -> None:
    parser = flags(__doc__, steps=50)
    parser.add_argument("--prompt", default="waves break on a lighthouse at dusk")
    given = parser.parse_args()

    # 1. Every rank loads the whole pipeline.
    device = cocodiff_compile.init_distributed(device="cpu" if given.tiny else None)
    pipe = tiny_pipeline("wan") if given.tiny else load().to(device)

    def film(**more: Any) -> Any:
        if given.tiny:  # instead of a prompt there are embeddings, which are random
            call = call_arguments("wan", given.steps, output_type="np")
        else:
            noise = torch.Generator().manual_seed(0)  # the same on every rank
            call = {"prompt": given.prompt, "generator": noise, "output_type": "np"}
            call.update(num_inference_steps=given.steps, height=720, width=1280, num_frames=81)
        return pipe(**call, **more).frames[0]

    # 2. A video is compiled block by block: its graphs are large, and its blocks all alike. Tokens
    # stay on their ranks from block to block. (So small a model is shared out only if told to.)
    expected = film() if given.tiny else None
    options = {"shard": {"min_gain": 0} if given.tiny else "tokens"}
    pipe.transformer.compile_repeated_blocks(backend=given.backend, fullgraph=True, options=options)

    # 3. Every rank makes the same call, and gets the same frames.
    times = StepTimes()
    with cocodiff_compile.collect_reports() as graphs:
        frames = film(callback_on_step_end=times)
    report(frames, expected, times, graphs)
    save(frames, given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
