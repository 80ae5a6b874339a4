# SPDX-License-Identifier: Apache-2.0
"""Lists the transformers for videos that `cocodiff coverage` builds tiny: names from K to Z."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from cocodiff_compile.lab.coverage.tiny import (
    CHANNELS,
    HEADS,
    WAN_LIKE,
    TinyClass,
    randn,
    text_mask,
    timesteps,
    video_inputs,
)

Inputs = dict[str, Any]


_KANDINSKY = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "time_dim": 32,
    "model_dim": 64,
    "ff_dim": 128,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}
_KANDINSKY_TEXT = {"in_text_dim": 32, "in_text_dim2": 24, "num_text_blocks": 1, "visual_cond": True}


def _kandinsky_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 8, 8, 9),
        "encoder_hidden_states": randn(2, 12, 32),
        "pooled_projections": randn(2, 24),
        "timestep": timesteps(2),
        "visual_rope_pos": [torch.arange(4), torch.arange(4), torch.arange(4)],
    }


def _ltx2_inputs() -> Inputs:
    rope = LTX2AudioVideoRotaryPosEmbed(64)
    audio_rope = LTX2AudioVideoRotaryPosEmbed(64, scale_factors=(4,), modality="audio")
    device = torch.device("cpu")
    mask = text_mask(12, 0, 0)
    return {
        "hidden_states": randn(2, 64, 4),
        "audio_hidden_states": randn(2, 16, 8),
        "encoder_hidden_states": randn(2, 12, 32),
        "audio_encoder_hidden_states": randn(2, 12, 32),
        "timestep": timesteps(2),
        "sigma": timesteps(2),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": 4,
        "height": 4,
        "width": 4,
        "fps": 24.0,
        "audio_num_frames": 16,
        "video_coords": rope.prepare_video_coords(2, 4, 4, 4, device, fps=24.0),
        "audio_coords": audio_rope.prepare_audio_coords(2, 16, device),
        "use_cross_timestep": True,
    }


def _minimax_h3_inputs() -> Inputs:
    """Packs 16 rows of text, 16 of audio and 64 of a video into one sequence."""
    text, audio, video = torch.split_with_sizes(torch.arange(96), [16, 16, 64])
    positions = torch.zeros(96, 3, dtype=torch.float64)
    positions[text, 0] = torch.arange(16, dtype=torch.float64)
    positions[audio, 0] = 16 + torch.arange(16, dtype=torch.float64) / 4
    positions[video] = torch.cartesian_prod(
        16.0 + torch.arange(4), *[1.0 * torch.arange(4)] * 2
    ).double()
    tags = torch.zeros(96, dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    timestep_indices = torch.ones(96, dtype=torch.long)
    timestep_indices[text] = 0
    return {
        "hidden_states": randn(1, 64, 16),
        "audio_hidden_states": randn(1, 16, 8),
        "encoder_hidden_states": randn(1, 16, 32),
        "timestep": torch.tensor([0.0, 0.5]),
        "timestep_indices": timestep_indices,
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def _wan_animate_inputs() -> Inputs:
    return {
        "hidden_states": randn(1, 12, 4, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, 512, 32),
        "encoder_hidden_states_image": randn(1, 8, 24),
        "pose_hidden_states": randn(1, 4, 3, 8, 8),
        "face_pixel_values": randn(1, 3, 9, 16, 16),
    }


def _wan_animate_2_inputs() -> Inputs:
    """Denoises 5 frames; 4 frames of a reference are in the cache."""
    cache = WanAnimate2KVCache(2)
    for layer in cache.layer_caches:
        layer.store(randn(1, 64, 4, 16), randn(1, 64, 4, 16))
    return {
        "hidden_states": [randn(4, 5, 8, 8)],
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": [randn(12, 32)],
        "condition_latents": [randn(8, 5, 8, 8)],
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": 80,
        "encoder_hidden_states_image": randn(1, 8, 1280),
        "reference_grid_sizes": torch.tensor([[4, 4, 4]]),
        "origin_len": 13,
        "origin_area": [64, 64],
        "is_uncondtion": False,
    }


MORE_VIDEO_CLASSES: dict[str, TinyClass] = {
    "Kandinsky5Transformer3DModel": TinyClass(
        config={**_KANDINSKY, **_KANDINSKY_TEXT},
        inputs=lambda: {
            **_kandinsky_inputs(),
            "text_rope_pos": torch.arange(12),
            "scale_factor": (1.0, 2.0, 2.0),
        },
    ),
    "Kandinsky6Transformer3DModel": TinyClass(
        config={
            **_KANDINSKY,
            **_KANDINSKY_TEXT,
            "in_audio_dim": 8,
            "out_audio_dim": 8,
            "text_token_padding": True,
            "ca_rope": True,
            "cross_gates": True,
            "fix_modulation": True,
        },
        inputs=lambda: {**_kandinsky_inputs(), "audio_hidden_states": randn(2, 16, 8)},
    ),
    "Kandinsky6SRTransformer3DModel": TinyClass(
        config={**_KANDINSKY, "nabla_window": (1, 1, 1)},
        inputs=lambda: {"hidden_states": randn(1, 2, 8, 8, 9), "timestep": timesteps(1)},
    ),
    "LatteTransformer3DModel": TinyClass(
        config={
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 64,
            "attention_bias": True,
            "sample_size": 8,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "norm_eps": 1e-6,
            "caption_channels": 32,
            "video_length": 8,
        },
        inputs=lambda: {
            "hidden_states": randn(2, 4, 8, 8, 8),
            "encoder_hidden_states": randn(2, 12, 32),
            "timestep": torch.tensor([500, 500]),
            "enable_temporal_attentions": True,
        },
    ),
    "LTX2VideoTransformer3DModel": TinyClass(
        config={
            **HEADS,
            **CHANNELS,
            "cross_attention_dim": 64,
            "audio_in_channels": 8,
            "audio_out_channels": 8,
            "audio_num_attention_heads": 4,
            "audio_attention_head_dim": 16,
            "audio_cross_attention_dim": 64,
            "num_layers": 2,
            "caption_channels": 32,
        },
        inputs=_ltx2_inputs,
    ),
    "MiniMaxH3Transformer3DModel": TinyClass(
        config={
            **HEADS,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 96,
            "in_channels": 4,
            "audio_in_channels": 8,
            "text_dim": 32,
            "freq_dim": 32,
            "time_embed_hidden_dim": 48,
            "time_embed_dim": 24,
            "rope_freq_dim": 2,
        },
        inputs=_minimax_h3_inputs,
    ),
    "MochiTransformer3DModel": TinyClass(
        config={
            **HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "text_embed_dim": 32,
            "time_embed_dim": 16,
            "max_sequence_length": 12,
        },
        inputs=lambda: {
            **video_inputs(),
            "encoder_attention_mask": text_mask(12, 3, 6).bool(),
        },
    ),
    "MotifVideoTransformer3DModel": TinyClass(
        config={
            **HEADS,
            "in_channels": 9,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 3,
            "num_decoder_layers": 1,
            "text_embed_dim": 32,
            "rope_axes_dim": (4, 6, 6),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        inputs=lambda: {**video_inputs(9), "encoder_attention_mask": text_mask(12, 3, 6)},
    ),
    "SkyReelsV2Transformer3DModel": TinyClass(config=WAN_LIKE, inputs=video_inputs),
    "WanAnimateTransformer3DModel": TinyClass(
        config={
            **WAN_LIKE,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 24,
            "added_kv_proj_dim": 64,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_encoder_size": 16,
            "motion_style_dim": 16,
            "motion_dim": 4,
            "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16,
            "inject_face_latents_blocks": 2,
        },
        inputs=_wan_animate_inputs,
    ),
    "WanAnimate2Transformer3DModel": TinyClass(
        config={
            "text_len": 16,
            "in_dim": 12,
            "dim": 64,
            "ffn_dim": 128,
            "freq_dim": 32,
            "text_dim": 32,
            "out_dim": 4,
            "num_heads": 4,
            "num_layers": 2,
        },
        inputs=_wan_animate_2_inputs,
    ),
    "WanVACETransformer3DModel": TinyClass(
        config={**WAN_LIKE, "vace_layers": [0, 1], "vace_in_channels": 12},
        inputs=lambda: {
            **video_inputs(),
            "control_hidden_states": randn(2, 12, 4, 8, 8),
            "control_hidden_states_scale": torch.ones(2),
        },
    ),
}
