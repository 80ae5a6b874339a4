# SPDX-License-Identifier: Apache-2.0
"""Lists more transformers for images that `cocodiff coverage` builds tiny."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

from cocodiff_compile.lab.coverage.tiny import TinyClass


def _text_mask(num_tokens: int, *num_kept: int) -> torch.Tensor:
    """Returns a mask [samples, tokens], True for the first tokens of each sample."""
    return torch.arange(num_tokens) < torch.tensor(num_kept).unsqueeze(1)


def _joy_image_edit_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 2, 4, 1, 16, 8),  # a reference image and the target
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": torch.randn(2, 12, 32),
    }


def _joy_image_edit_plus_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 64, 4, 1, 2, 2),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "encoder_hidden_states_mask": _text_mask(12, 12, 9).long(),
        "shape_list": [[(1, 8, 6), (1, 4, 4)]] * 2,
    }


def _omnigen_inputs() -> dict[str, Any]:
    num_text, num_image = 15, 64  # and a token of the timestep
    num_tokens = num_text + 1 + num_image
    mask = torch.ones(num_tokens, num_tokens)
    mask[: num_text + 1] = torch.ones(num_text + 1, num_tokens).tril()
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([0.5, 0.5]),
        "input_ids": torch.randint(0, 64, (2, num_text)),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask.repeat(2, 1, 1),
        "position_ids": torch.arange(num_tokens).repeat(2, 1),
    }


def _qwen_image_21_inputs() -> dict[str, Any]:
    num_text, height, width = 16, 8, 8
    num_slots = height * width // 4
    img_mask = torch.arange(num_text + num_slots) >= num_text
    return {
        "hidden_states": torch.randn(2, height * width, 16),
        "encoder_hidden_states": torch.randn(2, num_text, 32),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, height, width)]] * 2,
        "img_mask": img_mask.repeat(2, 1),
    }


_JOY_IMAGE_CONFIG = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "text_dim": 32,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}

MORE_IMAGE_CLASSES: dict[str, TinyClass] = {
    "JoyImageEditTransformer3DModel": TinyClass(
        config=_JOY_IMAGE_CONFIG, inputs=_joy_image_edit_inputs
    ),
    "JoyImageEditPlusTransformer3DModel": TinyClass(
        config=_JOY_IMAGE_CONFIG, inputs=_joy_image_edit_plus_inputs
    ),
    "LuminaNextDiT2DModel": TinyClass(
        config={
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 128,
            "num_layers": 2,
            "num_attention_heads": 8,
            "num_kv_heads": 4,
            "multiple_of": 16,
            "cross_attention_dim": 32,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "encoder_mask": _text_mask(12, 12, 9).long(),
            "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 32, 32),
            "cross_attention_kwargs": {"base_sequence_length": 64},
        },
    ),
    "Lumina2Transformer2DModel": TinyClass(
        config={
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 128,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 8,
            "num_kv_heads": 4,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (64, 32, 32),
            "cap_feat_dim": 32,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 16, 32),
            "encoder_attention_mask": _text_mask(16, 16, 12),
        },
    ),
    "NucleusMoEImageTransformer2DModel": TinyClass(
        config={
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
            # The class leaves the weights of its experts uninitialised: they may be NaN.
            "dense_moe_strategy": "all_dense",
            "num_experts": 4,
            "moe_intermediate_dim": 32,
            "capacity_factors": 2.0,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 64, 16),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "img_shapes": [(1, 8, 8)] * 2,
        },
    ),
    "OmniGenTransformer2DModel": TinyClass(
        config={
            "in_channels": 4,
            "patch_size": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 64,
            "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            "pos_embed_max_size": 16,
        },
        inputs=_omnigen_inputs,
    ),
    "PRXTransformer2DModel": TinyClass(
        config={
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 32,
            "hidden_size": 64,
            "num_heads": 4,
            "depth": 2,
            "axes_dim": [8, 8],
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "attention_mask": _text_mask(12, 12, 9),
        },
    ),
    "QwenImage21Transformer2DModel": TinyClass(
        config={
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "context_in_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        inputs=_qwen_image_21_inputs,
    ),
    "SanaTransformer2DModel": TinyClass(
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 64,
            "caption_channels": 32,
            "sample_size": 8,
            "patch_size": 1,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "encoder_attention_mask": _text_mask(12, 12, 9).long(),
            "timestep": torch.tensor([500.0, 500.0]),
        },
    ),
    "Transformer2DModel": TinyClass(
        config={
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 32,
            "num_layers": 2,
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 32, 8, 8),
            "encoder_hidden_states": torch.randn(2, 12, 32),
        },
    ),
}
