# SPDX-License-Identifier: Apache-2.0
"""Lists the transformers for images that `cocodiff coverage` builds tiny."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
)

from cocodiff_compile.lab.coverage.tiny import TinyClass

_TEXT_LENGTHS = (9, 16)
"""How many of the 16 text tokens of each sample are not padding."""


def _image_ids(num_axes: int = 3) -> torch.Tensor:
    """Returns position ids [64, axes] of 8 x 8 tokens; axes 1 and 2 are row and column."""
    ids = torch.zeros(8, 8, num_axes)
    ids[..., 1] = torch.arange(8)[:, None]
    ids[..., 2] = torch.arange(8)
    return ids.flatten(0, 1)


def _text_mask() -> torch.Tensor:
    """Returns a mask [2, 16], False for the padding behind the text of the first sample."""
    return torch.arange(16) < torch.tensor(_TEXT_LENGTHS)[:, None]


def _counted_text_ids() -> torch.Tensor:
    """Returns position ids [16, 3] whose rows and columns count the text tokens."""
    ids = torch.arange(16.0)
    return torch.stack([torch.zeros(16), ids, ids], dim=-1)


def _flux_like_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 64, 16),
        "encoder_hidden_states": torch.randn(2, 16, 32),
        "timestep": torch.full((2,), 0.5),
        "img_ids": _image_ids(),
        "txt_ids": torch.zeros(16, 3),
    }


def _flux3_inputs() -> dict[str, Any]:
    txt_ids = torch.zeros(16, 4)
    txt_ids[:, 3] = torch.arange(16)
    return {**_flux_like_inputs(), "img_ids": _image_ids(4), "txt_ids": txt_ids}


def _bria_fibo_inputs() -> dict[str, Any]:
    mask = torch.cat([_text_mask(), torch.ones(2, 64, dtype=torch.bool)], dim=1)
    return {
        **_flux_like_inputs(),
        "timestep": torch.full((2,), 500.0),
        "text_encoder_layers": [torch.randn(2, 16, 24) for _ in range(4)],
        "joint_attention_kwargs": {"attention_mask": mask[:, None, None, :]},
    }


def _longcat_inputs() -> dict[str, Any]:
    img_ids = _image_ids() + torch.tensor([1.0, 16.0, 16.0])
    return {**_flux_like_inputs(), "img_ids": img_ids, "txt_ids": _counted_text_ids()}


def _cogview_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 16, 32),
        "timestep": torch.full((2,), 500.0),
        "original_size": torch.full((2, 2), 128.0),
        "target_size": torch.full((2, 2), 128.0),
        "crop_coords": torch.zeros(2, 2),
    }


def _glm_image_inputs() -> dict[str, Any]:
    inputs = _cogview_inputs()
    del inputs["original_size"]
    return {
        **inputs,
        "prior_token_id": torch.randint(0, 64, (2, 64)),
        "prior_token_drop": torch.zeros(2, 64, dtype=torch.bool),
        "kv_caches": GlmImageKVCache(num_layers=2),
    }


def _hunyuan_dit_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": torch.full((2,), 500.0),
        "encoder_hidden_states": torch.randn(2, 16, 32),
        "text_embedding_mask": _text_mask().long(),
        "encoder_hidden_states_t5": torch.randn(2, 16, 24),
        "text_embedding_mask_t5": _text_mask().long(),
        "image_meta_size": torch.tensor([[128.0, 128.0, 128.0, 128.0, 0.0, 0.0]] * 2),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": get_2d_rotary_pos_embed(
            16, ((0, 0), (32, 32)), (8, 8), output_type="pt"
        ),
    }


def _ideogram4_inputs() -> dict[str, Any]:
    """Returns a packed sequence: padding, text and image of each sample."""
    position_ids = torch.zeros(2, 80, 3, dtype=torch.long)
    position_ids[:, 16:] = _image_ids().long() + IMAGE_POSITION_OFFSET
    segment_ids = torch.full((2, 80), SEQUENCE_PADDING_INDICATOR)
    indicator = torch.zeros(2, 80, dtype=torch.long)
    indicator[:, 16:] = OUTPUT_IMAGE_INDICATOR
    for index, length in enumerate(_TEXT_LENGTHS):
        text = slice(16 - length, 16)
        position_ids[index, text] = torch.arange(length)[:, None]
        segment_ids[index, 16 - length :] = 1
        indicator[index, text] = LLM_TOKEN_INDICATOR
    return {
        "hidden_states": torch.cat([torch.zeros(2, 16, 16), torch.randn(2, 64, 16)], dim=1),
        "timestep": torch.full((2,), 0.5),
        "encoder_hidden_states": torch.cat([torch.randn(2, 16, 32), torch.zeros(2, 64, 32)], dim=1),
        "position_ids": position_ids,
        "segment_ids": segment_ids,
        "indicator": indicator,
    }


_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
_FLUX_LIKE = {
    **_HEADS,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
_COGVIEW = {
    **_HEADS,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 16,
}

IMAGE_CLASSES: dict[str, TinyClass] = {
    "AuraFlowTransformer2DModel": TinyClass(
        config={
            **_HEADS,
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "out_channels": 4,
            "pos_embed_max_size": 256,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 16, 32),
            "timestep": torch.full((2,), 0.5),
        },
    ),
    "BriaTransformer2DModel": TinyClass(
        config=_FLUX_LIKE,
        inputs=lambda: {**_flux_like_inputs(), "timestep": torch.full((2,), 500.0)},
    ),
    "BriaFiboTransformer2DModel": TinyClass(
        config={**_FLUX_LIKE, "text_encoder_dim": 24}, inputs=_bria_fibo_inputs
    ),
    "BriaFibo2Transformer2DModel": TinyClass(
        config={
            "in_channels": 4,
            "patch_size": 2,
            "dim": 64,
            "n_layers": 2,
            "n_refiner_layers": 2,
            "n_heads": 4,
            "cap_feat_dim": 32,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 2,
            "min_num_gist_tokens": 16,
            "max_num_gist_tokens": 32,
            "gist_step": 8,
            "gist_min_text_len": 16,
            "gist_max_text_len": 64,
            "axes_dims": (4, 6, 6),
            "axes_lens": (64, 32, 32),
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": torch.full((2,), 0.5),
            "encoder_hidden_states": torch.randn(2, 2, 12, 32),
        },
    ),
    "CogView3PlusTransformer2DModel": TinyClass(
        config={**_COGVIEW, "pos_embed_max_size": 16, "sample_size": 16}, inputs=_cogview_inputs
    ),
    "CogView4Transformer2DModel": TinyClass(
        config={**_COGVIEW, "pos_embed_max_size": 16, "sample_size": 16}, inputs=_cogview_inputs
    ),
    "DiTTransformer2DModel": TinyClass(
        config={
            **_HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 16,
            "patch_size": 2,
            "num_embeds_ada_norm": 10,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor([500, 500]),
            "class_labels": torch.tensor([3, 10]),
        },
    ),
    "DreamLiteTransformer2DModel": TinyClass(
        config={
            **_HEADS,
            "in_channels": 64,
            "num_layers": 2,
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
            "use_linear_projection": True,
            "qk_norm": "rms_norm",
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 64, 8, 8),
            "encoder_hidden_states": torch.randn(2, 12, 32),
        },
    ),
    "ErnieImageTransformer2DModel": TinyClass(
        config={
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_layers": 2,
            "ffn_hidden_size": 128,
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 1,
            "text_in_dim": 32,
            "rope_axes_dim": (4, 6, 6),
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 16, 8, 8),
            "timestep": torch.full((2,), 500.0),
            "text_bth": torch.randn(2, 16, 32) * _text_mask().unsqueeze(-1),
            "text_lens": torch.tensor(_TEXT_LENGTHS),
        },
    ),
    "Flux3Transformer2DModel": TinyClass(
        config={**_FLUX_LIKE, "cond_in_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
        inputs=_flux3_inputs,
    ),
    "GlmImageTransformer2DModel": TinyClass(
        config={**_COGVIEW, "prior_vq_quantizer_codebook_size": 64}, inputs=_glm_image_inputs
    ),
    "HiDreamImageTransformer2DModel": TinyClass(
        config={
            **_HEADS,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "caption_channels": [32, 24],
            "text_emb_dim": 16,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (8, 4, 4),
            "max_resolution": (16, 16),
            "llama_layers": [0, 1, 2, 3],
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timesteps": torch.full((2,), 500.0),
            "encoder_hidden_states_t5": torch.randn(2, 16, 32),
            "encoder_hidden_states_llama3": torch.randn(4, 2, 16, 24),
            "pooled_embeds": torch.randn(2, 16),
        },
    ),
    "HunyuanDiT2DModel": TinyClass(
        config={
            **_HEADS,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 16,
            "hidden_size": 64,
            "num_layers": 4,
            "cross_attention_dim": 32,
            "cross_attention_dim_t5": 24,
            "pooled_projection_dim": 24,
            "text_len": 16,
            "text_len_t5": 16,
        },
        inputs=_hunyuan_dit_inputs,
    ),
    "HunyuanImageTransformer2DModel": TinyClass(
        config={
            **_HEADS,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 2,
            "text_embed_dim": 32,
            "text_embed_2_dim": 24,
            "rope_axes_dim": (8, 8),
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 16, 8, 8),
            "timestep": torch.full((2,), 500.0),
            "encoder_hidden_states": torch.randn(2, 16, 32),
            "encoder_attention_mask": _text_mask().long(),
            "encoder_hidden_states_2": torch.randn(2, 16, 24),
            "encoder_attention_mask_2": _text_mask().long(),
        },
    ),
    "Ideogram4Transformer2DModel": TinyClass(
        config={
            **_HEADS,
            "in_channels": 16,
            "num_layers": 2,
            "intermediate_size": 128,
            "adaln_dim": 32,
            "llm_features_dim": 32,
            "mrope_section": (4, 2, 2),
        },
        inputs=_ideogram4_inputs,
    ),
    "Krea2Transformer2DModel": TinyClass(
        config={
            "in_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "timestep_embed_dim": 32,
            "text_hidden_dim": 64,
            "num_text_layers": 12,
            "text_num_attention_heads": 4,
            "text_num_key_value_heads": 4,
            "text_intermediate_size": 128,
            "axes_dims_rope": (4, 6, 6),
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 64, 16),
            "encoder_hidden_states": torch.randn(2, 16, 12, 64),
            "timestep": torch.full((2,), 0.5),
            "position_ids": torch.cat([torch.zeros(16, 3), _image_ids()]),
            "encoder_attention_mask": _text_mask(),
        },
    ),
    "LongCatImageTransformer2DModel": TinyClass(
        config={**_FLUX_LIKE, "pooled_projection_dim": 32}, inputs=_longcat_inputs
    ),
    "OvisImageTransformer2DModel": TinyClass(
        config={**_FLUX_LIKE, "out_channels": 16},
        inputs=lambda: {**_flux_like_inputs(), "txt_ids": _counted_text_ids()},
    ),
    "PixArtTransformer2DModel": TinyClass(
        config={
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 64,
            "sample_size": 16,
            "patch_size": 2,
            "caption_channels": 32,
            "use_additional_conditions": False,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "timestep": torch.tensor([500, 500]),
        },
    ),
}
