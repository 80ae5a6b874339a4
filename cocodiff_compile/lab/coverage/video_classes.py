# SPDX-License-Identifier: Apache-2.0
"""Lists the transformers for videos that `cocodiff coverage` builds tiny: names from A to H."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro

from cocodiff_compile.lab.coverage.tiny import (
    CHANNELS,
    HEADS,
    WAN_LIKE,
    TinyClass,
    randn,
    text_mask,
    timesteps,
)

Inputs = dict[str, Any]


def _allegro_inputs() -> Inputs:
    *freqs, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        24, ((0, 0), (4, 4)), (4, 4), 4, interpolation_scale=(2.2, 2.0, 2.0)
    )
    positions = torch.cartesian_prod(grid_t.long(), grid_h.long(), grid_w.long())
    grids = positions.transpose(0, 1).reshape(3, 1, -1).contiguous()
    return {
        "hidden_states": randn(2, 4, 4, 8, 8),
        "encoder_hidden_states": randn(2, 12, 32),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": text_mask(12, 3, 6),
        "image_rotary_emb": (tuple(freqs), tuple(grids)),
    }


def _anyflow_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 4, 8, 8),
        "timestep": timesteps(2, 4),
        "r_timestep": timesteps(2, 4) - 100,
        "encoder_hidden_states": randn(2, 12, 32),
    }


def _anyflow_far_inputs() -> Inputs:
    """Denoises the second chunk, of 2 frames; the first, of 1 frame, is in the caches."""
    caches = {
        layer: {
            "full_cache": randn(2, 1, 4, 384, 16),
            "compressed_cache": torch.zeros(2, 1, 4, 32, 16),
        }
        for layer in range(2)
    }
    return {
        "hidden_states": randn(1, 2, 4, 16, 16),
        "timestep": timesteps(1, 2),
        "r_timestep": timesteps(1, 2) - 100,
        "encoder_hidden_states": randn(1, 12, 32),
        "chunk_partition": [1, 2],
        "kv_cache": caches,
        "kv_cache_flag": {"num_cached_chunks": 1, "is_cache_step": False},
    }


_COGVIDEOX = {
    **HEADS,
    **CHANNELS,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 13,
    "max_text_seq_length": 12,
    "use_rotary_positional_embeddings": True,
}


def _cogvideox_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 4, 8, 8),
        "encoder_hidden_states": randn(2, 12, 32),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 4),
    }


def _history_frames() -> tuple[torch.Tensor, ...]:
    """Returns the indices of 16, 2 and 2 frames of history, and of 2 frames to denoise."""
    prefix, long, mid, short, now = torch.split_with_sizes(torch.arange(22), [1, 16, 2, 1, 2])
    return long, mid, torch.cat([prefix, short]), now


def _helios_inputs() -> Inputs:
    long, mid, short, now = _history_frames()
    return {
        "hidden_states": randn(1, 4, 2, 8, 16),
        "encoder_hidden_states": randn(1, 12, 32),
        "timestep": torch.tensor([500]),
        "indices_hidden_states": now.unsqueeze(0),
        "indices_latents_history_short": short.unsqueeze(0),
        "indices_latents_history_mid": mid.unsqueeze(0),
        "indices_latents_history_long": long.unsqueeze(0),
        "latents_history_short": randn(1, 4, 2, 8, 16),
        "latents_history_mid": randn(1, 4, 2, 8, 16),
        "latents_history_long": randn(1, 4, 16, 8, 16),
    }


def _framepack_inputs() -> Inputs:
    long, mid, short, now = _history_frames()
    return {
        "hidden_states": randn(1, 4, 2, 8, 16),
        "encoder_hidden_states": randn(1, 12, 32),
        "timestep": timesteps(1),
        "encoder_attention_mask": text_mask(12, 4),
        "pooled_projections": randn(1, 24),
        "image_embeds": randn(1, 8, 24),
        "indices_latents": now,
        "guidance": torch.tensor([6000.0]),
        "latents_clean": randn(1, 4, 2, 8, 16),
        "indices_latents_clean": short,
        "latents_history_2x": randn(1, 4, 2, 8, 16),
        "indices_latents_history_2x": mid,
        "latents_history_4x": randn(1, 4, 16, 8, 16),
        "indices_latents_history_4x": long,
    }


def _hunyuan15_inputs() -> Inputs:
    return {
        "hidden_states": randn(1, 9, 4, 4, 4),
        "timestep": timesteps(1),
        "encoder_hidden_states": randn(1, 12, 32),
        "encoder_attention_mask": text_mask(12, 4),
        "encoder_hidden_states_2": randn(1, 8, 24),
        "encoder_attention_mask_2": text_mask(8, 4),
        "image_embeds": torch.zeros(1, 4, 24),
    }


VIDEO_CLASSES: dict[str, TinyClass] = {
    "AllegroTransformer3DModel": TinyClass(
        config={
            **HEADS,
            **CHANNELS,
            "attention_head_dim": 24,
            "num_layers": 2,
            "cross_attention_dim": 96,
            "caption_channels": 32,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 4,
        },
        inputs=_allegro_inputs,
    ),
    "AnyFlowTransformer3DModel": TinyClass(config=WAN_LIKE, inputs=_anyflow_inputs),
    "AnyFlowFARTransformer3DModel": TinyClass(
        config={**WAN_LIKE, "chunk_partition": (1, 2, 2)}, inputs=_anyflow_far_inputs
    ),
    "CogVideoXTransformer3DModel": TinyClass(config=_COGVIDEOX, inputs=_cogvideox_inputs),
    "ConsisIDTransformer3DModel": TinyClass(
        config={
            **_COGVIDEOX,
            "is_train_face": True,
            "cross_attn_dim_head": 16,
            "cross_attn_num_heads": 4,
            "LFE_id_dim": 24,
            "LFE_vit_dim": 32,
            "LFE_depth": 2,
            "LFE_dim_head": 16,
            "LFE_num_heads": 4,
            "LFE_num_querie": 8,
            "LFE_output_dim": 42,
            "LFE_num_scale": 2,
        },
        inputs=lambda: {
            **_cogvideox_inputs(),
            "id_cond": randn(2, 24),
            "id_vit_hidden": [randn(2, 9, 32), randn(2, 9, 32)],
        },
    ),
    "CosmosTransformer3DModel": TinyClass(
        config={
            **HEADS,
            **CHANNELS,
            "num_layers": 2,
            "text_embed_dim": 32,
            "adaln_lora_dim": 16,
            "max_size": (8, 16, 16),
            "concat_padding_mask": False,  # to resize the mask needs torchvision
        },
        inputs=lambda: {
            "hidden_states": randn(2, 4, 4, 8, 8),
            "timestep": timesteps(2),
            "encoder_hidden_states": randn(2, 12, 32),
            "fps": 30,
        },
    ),
    "EasyAnimateTransformer3DModel": TinyClass(
        config={
            **HEADS,
            **CHANNELS,
            "patch_size": 2,
            "num_layers": 4,
            "mmdit_layers": 2,
            "time_embed_dim": 32,
            "text_embed_dim": 32,
            "add_norm_text_encoder": True,
        },
        inputs=lambda: {
            "hidden_states": randn(2, 4, 4, 8, 8),
            "timestep": timesteps(2),
            "encoder_hidden_states": randn(2, 12, 32),
        },
    ),
    "HeliosTransformer3DModel": TinyClass(
        config={**WAN_LIKE, "rope_dim": (4, 6, 6)}, inputs=_helios_inputs
    ),
    "HunyuanVideo15Transformer3DModel": TinyClass(
        config={
            **HEADS,
            "in_channels": 9,
            "out_channels": 4,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 32,
            "text_embed_2_dim": 24,
            "image_embed_dim": 24,
            "rope_axes_dim": (4, 6, 6),
        },
        inputs=_hunyuan15_inputs,
    ),
    "HunyuanVideoFramepackTransformer3DModel": TinyClass(
        config={
            **HEADS,
            **CHANNELS,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 32,
            "pooled_projection_dim": 24,
            "rope_axes_dim": (4, 6, 6),
            "has_image_proj": True,
            "image_proj_dim": 24,
            "has_clean_x_embedder": True,
        },
        inputs=_framepack_inputs,
    ),
}
