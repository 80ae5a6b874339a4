# SPDX-License-Identifier: Apache-2.0
"""Whole diffusers pipelines with tiny components and random weights; text comes as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cocodiff_compile.lab.small_model_inputs import (
    LATENT_CHANNELS,
    POOLED_CHANNELS,
    TEXT_CHANNELS,
)
from cocodiff_compile.lab.small_models import SMALL_MODELS

TEXT_TOKENS = 7
_PACKED = LATENT_CHANNELS // 4
"""Latent channels where the pipeline packs squares of four latents into a token."""


def tiny_pipeline(name: str) -> Any:
    """Returns a pipeline whose weights are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = _BUILDERS[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_arguments(name: str, steps: int = 2, **changed: Any) -> dict[str, Any]:
    """Returns the arguments of a call of a pipeline, with a new generator."""
    make = torch.Generator().manual_seed(5)

    def text(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=make)

    arguments: dict[str, Any] = {
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(1),
        "output_type": "pt",
        **_SIZES[name],
        "prompt_embeds": text(TEXT_TOKENS, TEXT_CHANNELS),
        "negative_prompt_embeds": text(TEXT_TOKENS, TEXT_CHANNELS),
    }
    if name in ("flux", "flux controlnet", "sd3"):
        arguments["pooled_prompt_embeds"] = text(POOLED_CHANNELS)
        arguments["negative_pooled_prompt_embeds"] = text(POOLED_CHANNELS)
    if name == "flux controlnet":
        size = (arguments["height"], arguments["width"])
        arguments["control_image"] = torch.rand(1, 3, *size, generator=make)
    if name == "qwen-image":
        mask = torch.ones(1, TEXT_TOKENS, dtype=torch.long)
        arguments["prompt_embeds_mask"] = arguments["negative_prompt_embeds_mask"] = mask
    return {**arguments, **changed}


def masked_prompts() -> dict[str, Any]:
    """Returns the arguments of a call with two prompts of unequal length."""
    mask = torch.ones(2, TEXT_TOKENS, dtype=torch.long)
    mask[1, TEXT_TOKENS // 2 :] = 0
    make = torch.Generator().manual_seed(6)
    prompts = torch.randn(2, TEXT_TOKENS, TEXT_CHANNELS, generator=make)
    return {"prompt_embeds": prompts, "prompt_embeds_mask": mask, "true_cfg_scale": 1.0}


def randomize_zeros(model: nn.Module) -> None:
    """Gives parameters that begin with zeros random values: what is multiplied by them counts."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)


def add_lora(transformer: Any) -> None:
    """Adds a LoRA with random weights to a transformer; it is not merged into the weights."""
    from peft import LoraConfig  # noqa: PLC0415  (slow, and optional)

    names = ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "proj_mlp"]
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformer.add_adapter(config)


def _scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: PLC0415  (slow, and optional)

    return FlowMatchEulerDiscreteScheduler()


def vae(latent_channels: int, block_out_channels: tuple[int, ...] = (4, 8)) -> Any:
    """Returns an autoencoder that halves pictures with each block but the last."""
    from diffusers import AutoencoderKL  # noqa: PLC0415

    return AutoencoderKL(
        block_out_channels=block_out_channels,
        down_block_types=("DownEncoderBlock2D",) * len(block_out_channels),
        up_block_types=("UpDecoderBlock2D",) * len(block_out_channels),
        latent_channels=latent_channels,
        norm_num_groups=2,
        layers_per_block=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=0.5,
    ).eval()


def flux_parts() -> dict[str, Any]:
    """Returns what a FLUX pipeline is made of, without anything that reads text."""
    texts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return {
        "scheduler": _scheduler(),
        "vae": vae(_PACKED),
        "transformer": SMALL_MODELS["flux"].build(num_layers=2),
        **dict.fromkeys(texts),
    }


def _flux() -> Any:
    from diffusers import FluxPipeline  # noqa: PLC0415

    return FluxPipeline(**flux_parts())


def _flux_controlnet() -> Any:
    from diffusers import FluxControlNetModel, FluxControlNetPipeline  # noqa: PLC0415

    parts = flux_parts()
    config = parts["transformer"].config
    sizes = ("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim")
    more = ("pooled_projection_dim", "axes_dims_rope")
    controlnet = FluxControlNetModel(
        num_layers=1, num_single_layers=1, **{key: config[key] for key in (*sizes, *more)}
    ).eval()
    randomize_zeros(controlnet)
    return FluxControlNetPipeline(**parts, controlnet=controlnet)


def _sd3() -> Any:
    from diffusers import StableDiffusion3Pipeline  # noqa: PLC0415

    texts = [f"{kind}{end}" for kind in ("text_encoder", "tokenizer") for end in ("", "_2", "_3")]
    return StableDiffusion3Pipeline(
        transformer=SMALL_MODELS["sd3"].build(num_layers=2),
        scheduler=_scheduler(),
        vae=vae(LATENT_CHANNELS),
        **dict.fromkeys(texts),
    )


def _qwen_image() -> Any:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline  # noqa: PLC0415

    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=_PACKED,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * _PACKED,
        latents_std=[1.5] * _PACKED,
    ).eval()
    transformer = SMALL_MODELS["qwen-image"].build(num_layers=2)
    return QwenImagePipeline(
        scheduler=_scheduler(), vae=vae, text_encoder=None, tokenizer=None, transformer=transformer
    )


def _wan() -> Any:
    from diffusers import (  # noqa: PLC0415
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanPipeline,
    )

    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=SMALL_MODELS["wan"].build(num_layers=2),
    )


_BUILDERS = {
    "flux": _flux,
    "flux controlnet": _flux_controlnet,
    "sd3": _sd3,
    "qwen-image": _qwen_image,
    "wan": _wan,
}
_SIZES: dict[str, dict[str, int]] = {
    "flux": {"height": 20, "width": 12},
    "flux controlnet": {"height": 20, "width": 12},
    "sd3": {"height": 20, "width": 12},
    "qwen-image": {"height": 20, "width": 12},
    "wan": {"height": 48, "width": 80, "num_frames": 5},
}
