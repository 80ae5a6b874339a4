# SPDX-License-Identifier: Apache-2.0
"""Builds small models of public diffusion-transformer architectures, with random weights.

They are real diffusers classes at a size that runs on CPU in milliseconds, for tests, `cocodiff
check` and benchmarks without weights to download. diffusers is imported when a model is built.
"""

from __future__ import annotations

import inspect
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

_BLOCKS = r"(single_)?transformer_blocks\.\d+\."


@dataclass(frozen=True)
class ModelSize:
    """Holds the size of a model. `num_layers` counts the blocks of each kind where an architecture
    has several; `num_single_layers`, if given, counts the single-stream blocks.
    """

    num_layers: int
    heads: int
    head_size: int
    num_single_layers: int | None = None

    def rope_axes(self, num_axes: int) -> tuple[int, ...]:
        """Returns even sizes that sum to the head size; the first axis takes the remainder."""
        axis = self.head_size // (2 * num_axes) * 2
        return (self.head_size - axis * (num_axes - 1), *[axis] * (num_axes - 1))

    def config(self) -> dict[str, Any]:
        """Returns the size under all names that constructors of diffusers have for it."""
        single = self.num_layers if self.num_single_layers is None else self.num_single_layers
        channels = self.heads * self.head_size
        return {
            **dict.fromkeys(("num_layers", "n_layers"), self.num_layers),
            "num_single_layers": single,
            **dict.fromkeys(("num_attention_heads", "n_heads", "n_kv_heads"), self.heads),
            "attention_head_dim": self.head_size,
            **dict.fromkeys(("dim", "caption_projection_dim", "cross_attention_dim"), channels),
            "ffn_dim": 4 * channels,
            **dict.fromkeys(("in_channels", "out_channels"), LATENT_CHANNELS),
            **dict.fromkeys(("joint_attention_dim", "text_dim", "text_embed_dim"), TEXT_CHANNELS),
            **dict.fromkeys(("caption_channels", "cap_feat_dim"), TEXT_CHANNELS),
            "pooled_projection_dim": POOLED_CHANNELS,
            **dict.fromkeys(("axes_dims_rope", "rope_axes_dim", "axes_dims"), self.rope_axes(3)),
        }


@dataclass(frozen=True)
class SmallModel:
    """Describes one architecture: how to build it small, its inputs, and how to denoise with it."""

    name: str
    class_name: str
    make_inputs: Callable[[InputMaker], Inputs]
    ulysses_attention: str = _BLOCKS + "attn"  # a regular expression of module names
    config: Callable[[ModelSize], Mapping[str, Any]] = lambda _size: {}
    """The settings that differ from diffusers' own, besides those of `ModelSize.config`."""
    has_mask: bool = False
    latent_key: str = "hidden_states"
    timestep_key: str = "timestep"
    timestep_scale: float = 1.0  # from the scheduler's 0..1000
    latents_are_a_list: bool = False
    prepare: Callable[[Any], None] = lambda _model: None
    """Does what the model would do in its first call, and no graph can hold."""

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
        """Returns a model with the same weights on every rank; keeps the global RNG state."""
        size = ModelSize(num_layers, heads, head_size, num_single_layers)
        taken = inspect.signature(self.model_class.__init__).parameters
        common = {name: value for name, value in size.config().items() if name in taken}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = self.model_class(**{**common, **self.config(size)})
        cast_parameters(model, dtype)
        self.prepare(model)
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
        maker = InputMaker(
            next(model.parameters()).detach(),
            image_tokens,
            text_tokens,
            batch,
            masked,
            frames=next(count for count in (3, 2, 1) if image_tokens % count == 0),
            generator=torch.Generator().manual_seed(seed),
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
        """Returns `inputs` at another point of the denoising; `timestep` counts from 0 to 1000."""
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
    """Casts parameters, not buffers (RoPE tables); `Module.to` also fails on fake tensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def _sd3_config(_size: ModelSize) -> dict[str, Any]:
    return {"sample_size": 32, "pos_embed_max_size": 64}


def _sd35_config(size: ModelSize) -> dict[str, Any]:
    dual = tuple(range((size.num_layers + 1) // 2))
    return {**_sd3_config(size), "dual_attention_layers": dual, "qk_norm": "rms_norm"}


def _wan_config(_size: ModelSize) -> dict[str, Any]:
    return {"freq_dim": 32}


def _fill_z_image_rope(model: Any) -> None:
    rope = model.rope_embedder
    rope.freqs_cis = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)


_SD3_ATTN = _BLOCKS + "attn2?"
_WAN_ATTN = r"blocks\.\d+\.attn1"
"""Cross-attention (attn2) reads the whole text and exchanges nothing."""

SMALL_MODELS: dict[str, SmallModel] = {
    model.name: model
    for model in (
        SmallModel("flux", "FluxTransformer2DModel", inputs_of.flux_inputs, timestep_scale=0.001),
        SmallModel(
            "flux2",
            "Flux2Transformer2DModel",
            inputs_of.flux2_inputs,
            config=lambda size: {
                "timestep_guidance_channels": 32,
                "axes_dims_rope": size.rope_axes(4),
            },
            timestep_scale=0.001,
        ),
        SmallModel("sd3", "SD3Transformer2DModel", inputs_of.sd3_inputs, _SD3_ATTN, _sd3_config),
        SmallModel("sd3.5", "SD3Transformer2DModel", inputs_of.sd3_inputs, _SD3_ATTN, _sd35_config),
        SmallModel(
            "qwen-image",
            "QwenImageTransformer2DModel",
            inputs_of.qwen_inputs,
            config=lambda _size: {"patch_size": 1},
            has_mask=True,
            timestep_scale=0.001,
        ),
        SmallModel("wan", "WanTransformer3DModel", inputs_of.wan_inputs, _WAN_ATTN, _wan_config),
        SmallModel(
            "ltx",
            "LTXVideoTransformer3DModel",
            inputs_of.ltx_inputs,
            _BLOCKS + "attn1",
            has_mask=True,
        ),
        SmallModel(
            "chroma",
            "ChromaTransformer2DModel",
            inputs_of.chroma_inputs,
            config=lambda _size: {"approximator_hidden_dim": 32, "approximator_layers": 1},
            has_mask=True,
            timestep_scale=0.001,
        ),
        SmallModel(
            "chronoedit",
            "ChronoEditTransformer3DModel",
            inputs_of.wan_inputs,
            _WAN_ATTN,
            _wan_config,
        ),
        SmallModel(
            "hunyuan-video",
            "HunyuanVideoTransformer3DModel",
            inputs_of.hunyuan_inputs,
            rf"({_BLOCKS}|context_embedder\.token_refiner\.refiner_blocks\.\d+\.)attn",
            config=lambda _size: {"num_refiner_layers": 1},
            has_mask=True,
        ),
        SmallModel(
            "z-image",
            "ZImageTransformer2DModel",
            inputs_of.z_image_inputs,
            r"(noise_refiner|context_refiner|layers)\.\d+\.attention",
            lambda _size: {"axes_lens": [1024, 256, 256]},
            has_mask=True,
            latent_key="x",
            timestep_key="t",
            timestep_scale=0.001,
            latents_are_a_list=True,
            prepare=_fill_z_image_rope,
        ),
    )
}
