"""Builds small models of public diffusion-transformer architectures, with random weights.

They are real diffusers classes at a size that runs on CPU in milliseconds, for tests, the demo and
benchmarks without weights to download. diffusers is imported when a model is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cocodiff_compile.lab import small_model_inputs as inputs_of
from cocodiff_compile.lab.small_model_inputs import (
    LATENT_CHANNELS,
    POOLED_CHANNELS,
    TEXT_CHANNELS,
    InputMaker,
    Inputs,
)


@dataclass(frozen=True)
class ModelSize:
    """Holds the size of a model. `num_layers` counts the blocks of each kind where an architecture
    has several; `num_single_layers`, if given, counts the single-stream blocks.
    """

    num_layers: int
    heads: int
    head_size: int
    num_single_layers: int | None = None

    @property
    def channels(self) -> int:
        return self.heads * self.head_size

    def rope_axes(self, num_axes: int) -> tuple[int, ...]:
        """Returns even sizes that sum to the head size; the first axis takes the remainder."""
        axis = self.head_size // (2 * num_axes) * 2
        return (self.head_size - axis * (num_axes - 1), *[axis] * (num_axes - 1))

    def common_config(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_size,
        }

    def two_kinds_config(self) -> dict[str, Any]:
        """Returns the config of an architecture with double-stream and single-stream blocks."""
        single = self.num_layers if self.num_single_layers is None else self.num_single_layers
        return {**self.common_config(), "num_single_layers": single}


@dataclass(frozen=True)
class SmallModel:
    """Describes one architecture: how to build it small, its inputs, and how to denoise with it."""

    name: str
    class_name: str
    config: Callable[[ModelSize], dict[str, Any]]
    make_inputs: Callable[[InputMaker], Inputs]
    ulysses_attention: str  # a regular expression of module names
    has_mask: bool = False
    latent_key: str = "hidden_states"
    timestep_key: str = "timestep"
    timestep_scale: float = 1.0  # from the scheduler's 0..1000
    latents_are_a_list: bool = False

    @property
    def model_class(self) -> type[nn.Module]:
        import diffusers  # noqa: PLC0415  (slow, and optional)

        model_class: type[nn.Module] = getattr(diffusers, self.class_name)
        return model_class

    def build(
        self,
        *,
        num_layers: int = 2,
        num_single_layers: int | None = None,
        heads: int = 4,
        head_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> nn.Module:
        """Returns a model with the same weights on every rank. The global RNG state is neither used
        nor changed.
        """
        size = ModelSize(num_layers, heads, head_size, num_single_layers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = self.model_class(**self.config(size))
        cast_parameters(model, dtype)
        return model.eval()

    def inputs(
        self,
        model: nn.Module,
        *,
        image_tokens: int = 48,
        text_tokens: int = 24,
        batch: int = 1,
        masked: bool = False,
        seed: int = 0,
    ) -> Inputs:
        """Returns the keyword arguments of `forward`; with `masked`, prompts of unequal length."""
        if masked and not self.has_mask:
            raise ValueError(f"{self.name} takes no mask: leave masked=False.")
        parameter = next(model.parameters())
        maker = InputMaker(
            image_tokens,
            text_tokens,
            batch,
            masked,
            parameter.device,
            parameter.dtype,
            torch.Generator().manual_seed(seed),
        )
        return {**self.make_inputs(maker), "return_dict": False}

    def num_ulysses_attentions(self, model: nn.Module) -> int:
        """Returns the number of attentions that exchange heads, from the module tree."""
        pattern = re.compile(self.ulysses_attention)
        return sum(pattern.fullmatch(name) is not None for name, _ in model.named_modules())

    def latents(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Returns the latents in `inputs` as one tensor that a scheduler can step."""
        value: Any = inputs[self.latent_key]
        return torch.stack(value) if self.latents_are_a_list else value

    def denoise_input(
        self, inputs: Mapping[str, Any], latents: torch.Tensor, timestep: torch.Tensor
    ) -> Inputs:
        """Returns `inputs` at another point of the denoising; `timestep` is a scheduler's, 0 to
        1000.
        """
        time = inputs[self.timestep_key]
        return {
            **inputs,
            self.latent_key: list(latents.unbind()) if self.latents_are_a_list else latents,
            self.timestep_key: timestep.to(time).expand_as(time) * self.timestep_scale,
        }

    def sample(self, output: Any) -> torch.Tensor:
        """Returns the prediction in the result of `forward`, in the shape of the latents."""
        value: Any = output[0]
        return torch.stack(value) if self.latents_are_a_list else value


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters only. Buffers (RoPE tables) keep their precision; `Module.to` also fails on
    fake tensors.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def _flux_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.two_kinds_config(),
        "in_channels": LATENT_CHANNELS,
        "joint_attention_dim": TEXT_CHANNELS,
        "pooled_projection_dim": POOLED_CHANNELS,
        "axes_dims_rope": size.rope_axes(3),
    }


def _flux2_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.two_kinds_config(),
        "in_channels": LATENT_CHANNELS,
        "joint_attention_dim": TEXT_CHANNELS,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": size.rope_axes(4),
    }


def _chroma_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.two_kinds_config(),
        "in_channels": LATENT_CHANNELS,
        "joint_attention_dim": TEXT_CHANNELS,
        "axes_dims_rope": size.rope_axes(3),
        "approximator_num_channels": 64,
        "approximator_hidden_dim": 32,
        "approximator_layers": 1,
    }


def _sd3_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.common_config(),
        "sample_size": 32,
        "in_channels": LATENT_CHANNELS,
        "joint_attention_dim": TEXT_CHANNELS,
        "caption_projection_dim": size.channels,
        "pooled_projection_dim": POOLED_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "pos_embed_max_size": 64,
    }


def _sd35_config(size: ModelSize) -> dict[str, Any]:
    dual = tuple(range((size.num_layers + 1) // 2))
    return {**_sd3_config(size), "dual_attention_layers": dual, "qk_norm": "rms_norm"}


def _qwen_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.common_config(),
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "patch_size": 1,
        "joint_attention_dim": TEXT_CHANNELS,
        "axes_dims_rope": size.rope_axes(3),
    }


def _wan_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.common_config(),
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": TEXT_CHANNELS,
        "freq_dim": 32,
        "ffn_dim": 4 * size.channels,
        "rope_max_seq_len": 1024,
    }


def _ltx_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.common_config(),
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "cross_attention_dim": size.channels,
        "caption_channels": TEXT_CHANNELS,
    }


def _hunyuan_config(size: ModelSize) -> dict[str, Any]:
    return {
        **size.two_kinds_config(),
        "num_refiner_layers": 1,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_embed_dim": TEXT_CHANNELS,
        "pooled_projection_dim": POOLED_CHANNELS,
        "rope_axes_dim": size.rope_axes(3),
    }


def _z_image_config(size: ModelSize) -> dict[str, Any]:
    return {
        "in_channels": LATENT_CHANNELS,
        "dim": size.channels,
        "n_layers": size.num_layers,
        "n_refiner_layers": 2,
        "n_heads": size.heads,
        "n_kv_heads": size.heads,
        "cap_feat_dim": TEXT_CHANNELS,
        "axes_dims": list(size.rope_axes(3)),
        "axes_lens": [1024, 256, 256],
    }


_BLOCKS = r"(single_)?transformer_blocks\.\d+\."

SMALL_MODELS: dict[str, SmallModel] = {
    model.name: model
    for model in (
        SmallModel(
            "flux",
            "FluxTransformer2DModel",
            _flux_config,
            inputs_of.flux_inputs,
            _BLOCKS + "attn",
            timestep_scale=0.001,
        ),
        SmallModel(
            "flux2",
            "Flux2Transformer2DModel",
            _flux2_config,
            inputs_of.flux2_inputs,
            _BLOCKS + "attn",
            timestep_scale=0.001,
        ),
        SmallModel(
            "sd3", "SD3Transformer2DModel", _sd3_config, inputs_of.sd3_inputs, _BLOCKS + "attn2?"
        ),
        SmallModel(
            "sd3.5", "SD3Transformer2DModel", _sd35_config, inputs_of.sd3_inputs, _BLOCKS + "attn2?"
        ),
        SmallModel(
            "qwen-image",
            "QwenImageTransformer2DModel",
            _qwen_config,
            inputs_of.qwen_inputs,
            _BLOCKS + "attn",
            has_mask=True,
            timestep_scale=0.001,
        ),
        # Wan's cross-attention (attn2) keeps its text whole and exchanges nothing.
        SmallModel(
            "wan", "WanTransformer3DModel", _wan_config, inputs_of.wan_inputs, r"blocks\.\d+\.attn1"
        ),
        SmallModel(
            "ltx",
            "LTXVideoTransformer3DModel",
            _ltx_config,
            inputs_of.ltx_inputs,
            _BLOCKS + "attn[12]",
            has_mask=True,
        ),
        SmallModel(
            "chroma",
            "ChromaTransformer2DModel",
            _chroma_config,
            inputs_of.chroma_inputs,
            _BLOCKS + "attn",
            has_mask=True,
            timestep_scale=0.001,
        ),
        SmallModel(
            "chronoedit",
            "ChronoEditTransformer3DModel",
            _wan_config,
            inputs_of.wan_inputs,
            r"blocks\.\d+\.attn1",
        ),
        SmallModel(
            "hunyuan-video",
            "HunyuanVideoTransformer3DModel",
            _hunyuan_config,
            inputs_of.hunyuan_inputs,
            _BLOCKS + "attn",
            has_mask=True,
        ),
        SmallModel(
            "z-image",
            "ZImageTransformer2DModel",
            _z_image_config,
            inputs_of.z_image_inputs,
            r"(noise_refiner|layers)\.\d+\.attention",
            has_mask=True,
            latent_key="x",
            timestep_key="t",
            timestep_scale=0.001,
            latents_are_a_list=True,
        ),
    )
}
