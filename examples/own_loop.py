# SPDX-License-Identifier: Apache-2.0
"""A denoising loop of one's own, in which exchanges carry what changed since the last step (lossy).

    torchrun --nproc-per-node 4 examples/own_loop.py --out lighthouse.png
    torchrun --nproc-per-node 2 examples/own_loop.py --tiny --out shapes.png

Stable Diffusion 3 is loaded by name, and each rank takes its accelerator: never run by this
project. With --tiny a small FLUX that was trained to draw plain shapes, and comes with the package,
runs on CPU, and what is lost is measured. docs/v_major.md says what V-Major sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from shared import StepTimes, flags, is_checked, save, say
from torch import Tensor
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.quality.small_dit import Sampling, conditioning, load_small_dit
from cocodiff_compile.lab.quality.small_dit import to_pictures as shapes

GUIDANCE = 3.0
LEAST_PSNR = 30.0


class TrainedShapes:
    """The small model, and what it is called with: with four prompts, and without."""

    def __init__(self) -> None:
        self.model, self.noise, self.time_scale = load_small_dit(), Sampling().noise(0), 0.001
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        prompts = {"cond": Sampling().prompts(0), "uncond": None}
        self.given = {name: conditioning(p, 4, torch.float32) for name, p in prompts.items()}

    def decode(self, latents: Tensor) -> Tensor:
        return shapes(latents) / 2 + 0.5


class PublicModel:
    """Stable Diffusion 3, and what it is called with: with a prompt, and without."""

    def __init__(self, device: torch.device, prompt: str) -> None:
        from diffusers import StableDiffusion3Pipeline  # noqa: PLC0415  (needs transformers)

        name = "stabilityai/stable-diffusion-3-medium-diffusers"
        self.pipe = StableDiffusion3Pipeline.from_pretrained(name, torch_dtype=torch.bfloat16)
        text, no_text, pooled, no_pooled = self.pipe.to(device).encode_prompt(prompt, None, None)
        self.model, self.time_scale = self.pipe.transformer, 1.0
        self.scheduler = self.pipe.scheduler
        self.noise = torch.randn(1, 16, 128, 128, generator=torch.manual_seed(0)).to(device)
        self.given = {
            "cond": {"encoder_hidden_states": text, "pooled_projections": pooled},
            "uncond": {"encoder_hidden_states": no_text, "pooled_projections": no_pooled},
        }

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(scaled.to(vae.dtype)).sample / 2 + 0.5


def denoise(parts: Any, model: Callable[..., Any], steps: int, times: StepTimes) -> Any:
    """Returns pictures, and a record of what each step sent."""
    scheduler, latents, velocity = parts.scheduler, parts.noise, {}
    scheduler.set_timesteps(steps, device=latents.device)
    with cocodiff_compile.denoising(num_steps=steps) as run:
        for moment in scheduler.timesteps:
            time = (moment * parts.time_scale).expand(len(latents))
            for name, given in parts.given.items():
                tokens = latents.to(given["pooled_projections"].dtype)
                inputs = {"hidden_states": tokens, "timestep": time, **given}
                with run.branch(name):  # differences are taken to the same branch's last call
                    velocity[name] = model(**inputs, return_dict=False)[0].float()
            guided = GUIDANCE * velocity["cond"] + (1 - GUIDANCE) * velocity["uncond"]
            latents = scheduler.step(guided, moment, latents, return_dict=False)[0]
            run.step()  # says where a step ends
            times()
        pictures = parts.decode(latents).clamp(0, 1).permute(0, 2, 3, 1)
    return pictures.float().cpu(), run.history


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--prompt", default="a lighthouse at dusk, oil on canvas")
    given = parser.parse_args()
    torch.set_grad_enabled(False)  # cocodiff compiles inference, and leaves training alone
    device = cocodiff_compile.init_distributed(device="cpu" if given.tiny else None)
    parts = TrainedShapes() if given.tiny else PublicModel(device, given.prompt)

    # So small a model gains nothing: it is shared out, and its exchanges coded, if told to anyway.
    options = {"shard": "tokens", "v_major": {}}
    if given.tiny:
        options = {"shard": {"min_gain": 0}, "v_major": {"only_if_faster": False}}
    compiled = torch.compile(parts.model, backend=given.backend, dynamic=False, options=options)

    times = StepTimes()
    pictures, history = denoise(parts, compiled, given.steps, times)
    say(str(times))
    sent, full = (
        sum(getattr(step, f"{kind}_bytes") for step in history) for kind in ("sent", "full")
    )
    say(f"exchanges carried {sent:,} bytes, uncompressed ones would carry {full:,}")
    if is_checked(pictures) and given.tiny:
        exact, _ = denoise(parts, parts.model, given.steps, StepTimes())
        psnr = float(-10 * (pictures - exact).square().mean().log10())
        say(f"distance from uncompiled: {psnr:.1f} dB")
        if not psnr >= LEAST_PSNR:
            raise SystemExit(f"that is less than {LEAST_PSNR} dB")
    save(torch.cat(list(pictures), 1)[None], given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
