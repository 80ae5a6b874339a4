# SPDX-License-Identifier: Apache-2.0
"""Draws pictures with FLUX and a LoRA that is not merged into the weights, at several strengths.

    torchrun --nproc-per-node 4 examples/lora.py --weights XLabs-AI/flux-RealismLora --out full.png
    torchrun --nproc-per-node 2 examples/lora.py --tiny

The public weights are loaded by name, and each rank takes its accelerator: never run by this
project. With --tiny the same pipeline has tiny parts with random weights, runs on CPU, and is
compared with itself uncompiled. Needs peft: pip install -c constraints.txt '.[adapters]'.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from diffusers import FluxPipeline
from shared import StepTimes, flags, report, save, say
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.tiny_pipelines import add_lora, call_arguments, tiny_pipeline

MODEL = "black-forest-labs/FLUX.1-dev"
STRENGTHS = (1.0, 0.4)


def load(weights: str) -> Any:
    pipe = FluxPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16)
    pipe.load_lora_weights(weights)
    return pipe


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--prompt", default="a lighthouse at dusk, oil on canvas")
    parser.add_argument("--weights", default="XLabs-AI/flux-RealismLora", help="the LoRA")
    given = parser.parse_args()

    # 1. Every rank loads the whole pipeline, and the LoRA.
    device = cocodiff_compile.init_distributed(device="cpu" if given.tiny else None)
    if given.tiny:
        pipe = tiny_pipeline("flux")
        add_lora(pipe.transformer)
    else:
        pipe = load(given.weights).to(device)

    def draw(strength: float, **more: Any) -> Any:
        if given.tiny:  # instead of a prompt there are embeddings, which are random
            call = call_arguments("flux", given.steps, output_type="np")
        else:
            noise = torch.Generator().manual_seed(0)  # the same on every rank
            call = {"prompt": given.prompt, "generator": noise, "output_type": "np"}
            call["num_inference_steps"] = given.steps
        return pipe(**call, joint_attention_kwargs={"scale": strength}, **more).images

    # 2. The transformer is compiled with the LoRA's matmuls in its graph. So small a model gains
    # nothing, and is shared out only if told that this does not matter.
    expected = [draw(strength) for strength in STRENGTHS] if given.tiny else [None, None]
    options = {"shard": {"min_gain": 0} if given.tiny else "tokens"}
    pipe.transformer = torch.compile(
        pipe.transformer, backend=given.backend, dynamic=False, options=options
    )

    # 3. Another strength, or another LoRA, is compiled when it first occurs.
    drawn = []
    for strength, wanted in zip(STRENGTHS, expected, strict=True):
        say(f"strength {strength}:")
        times = StepTimes()
        with cocodiff_compile.collect_reports() as graphs:
            drawn.append(draw(strength, callback_on_step_end=times))
        report(drawn[-1], wanted, times, graphs)
    say(f"strengths differ by {numpy.abs(drawn[0] - drawn[1]).max():.3f} of 1 at most")
    save(drawn[0], given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
