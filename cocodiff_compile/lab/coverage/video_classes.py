"""Lists the transformers for videos that `cocodiff coverage` builds tiny."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from cocodiff_compile.lab.coverage.tiny import TinyClass, randn

Inputs = dict[str, Any]

_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
_CHANNELS = {"in_channels": 4, "out_channels": 4}


def _timesteps(*shape: int) -> torch.Tensor:
    return torch.full(shape, 500.0)


def _text_mask(num_tokens: int, *padded: int) -> torch.Tensor:
    """Returns a mask [samples, tokens] of whole numbers; `padded` is how many each sample lacks."""
    lengths = num_tokens - torch.tensor(padded).unsqueeze(1)
    return (torch.arange(num_tokens) < lengths).long()


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
        "encoder_attention_mask": _text_mask(12, 3, 6),
        "image_rotary_emb": (tuple(freqs), tuple(grids)),
    }


_ANYFLOW = {**_HEADS, **_CHANNELS, "text_dim": 32, "freq_dim": 32, "ffn_dim": 128, "num_layers": 2}


def _anyflow_inputs() -> Inputs:
    return {
        "hidden_states": randn(2, 4, 4, 8, 8),
        "timestep": _timesteps(2, 4),
        "r_timestep": _timesteps(2, 4) - 100,
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
        "timestep": _timesteps(1, 2),
        "r_timestep": _timesteps(1, 2) - 100,
        "encoder_hidden_states": randn(1, 12, 32),
        "chunk_partition": [1, 2],
        "kv_cache": caches,
        "kv_cache_flag": {"num_cached_chunks": 1, "is_cache_step": False},
    }


_COGVIDEOX = {
    **_HEADS,
    **_CHANNELS,
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
        "timestep": _timesteps(1),
        "encoder_attention_mask": _text_mask(12, 4),
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
        "timestep": _timesteps(1),
        "encoder_hidden_states": randn(1, 12, 32),
        "encoder_attention_mask": _text_mask(12, 4),
        "encoder_hidden_states_2": randn(1, 8, 24),
        "encoder_attention_mask_2": _text_mask(8, 4),
        "image_embeds": torch.zeros(1, 4, 24),
    }


def _video_inputs(num_channels: int = 4) -> Inputs:
    return {
        "hidden_states": randn(2, num_channels, 4, 8, 8),
        "timestep": _timesteps(2),
        "encoder_hidden_states": randn(2, 12, 32),
    }


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
        "timestep": _timesteps(2),
        "visual_rope_pos": [torch.arange(4), torch.arange(4), torch.arange(4)],
    }


def _ltx2_inputs() -> Inputs:
    rope = LTX2AudioVideoRotaryPosEmbed(64)
    audio_rope = LTX2AudioVideoRotaryPosEmbed(64, scale_factors=(4,), modality="audio")
    device = torch.device("cpu")
    mask = _text_mask(12, 0, 0)
    return {
        "hidden_states": randn(2, 64, 4),
        "audio_hidden_states": randn(2, 16, 8),
        "encoder_hidden_states": randn(2, 12, 32),
        "audio_encoder_hidden_states": randn(2, 12, 32),
        "timestep": _timesteps(2),
        "sigma": _timesteps(2),
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


VIDEO_CLASSES: dict[str, TinyClass] = {
    "AllegroTransformer3DModel": TinyClass(
        config={
            **_HEADS,
            **_CHANNELS,
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
    "AnyFlowTransformer3DModel": TinyClass(config=_ANYFLOW, inputs=_anyflow_inputs),
    "AnyFlowFARTransformer3DModel": TinyClass(
        config={**_ANYFLOW, "chunk_partition": (1, 2, 2)}, inputs=_anyflow_far_inputs
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
            **_HEADS,
            **_CHANNELS,
            "num_layers": 2,
            "text_embed_dim": 32,
            "adaln_lora_dim": 16,
            "max_size": (8, 16, 16),
            "concat_padding_mask": False,  # to resize the mask needs torchvision
        },
        inputs=lambda: {
            "hidden_states": randn(2, 4, 4, 8, 8),
            "timestep": _timesteps(2),
            "encoder_hidden_states": randn(2, 12, 32),
            "fps": 30,
        },
    ),
    "EasyAnimateTransformer3DModel": TinyClass(
        config={
            **_HEADS,
            **_CHANNELS,
            "patch_size": 2,
            "num_layers": 4,
            "mmdit_layers": 2,
            "time_embed_dim": 32,
            "text_embed_dim": 32,
            "add_norm_text_encoder": True,
        },
        inputs=lambda: {
            "hidden_states": randn(2, 4, 4, 8, 8),
            "timestep": _timesteps(2),
            "encoder_hidden_states": randn(2, 12, 32),
        },
    ),
    "HeliosTransformer3DModel": TinyClass(
        config={**_ANYFLOW, "rope_dim": (4, 6, 6)}, inputs=_helios_inputs
    ),
    "HunyuanVideo15Transformer3DModel": TinyClass(
        config={
            **_HEADS,
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
            **_HEADS,
            **_CHANNELS,
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
        inputs=lambda: {"hidden_states": randn(1, 2, 8, 8, 9), "timestep": _timesteps(1)},
    ),
    "LatteTransformer3DModel": TinyClass(
        config={
            **_HEADS,
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
            **_HEADS,
            **_CHANNELS,
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
            **_HEADS,
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
            **_HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "text_embed_dim": 32,
            "time_embed_dim": 16,
            "max_sequence_length": 12,
        },
        inputs=lambda: {
            **_video_inputs(),
            "encoder_attention_mask": _text_mask(12, 3, 6).bool(),
        },
    ),
    "MotifVideoTransformer3DModel": TinyClass(
        config={
            **_HEADS,
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
        inputs=lambda: {**_video_inputs(9), "encoder_attention_mask": _text_mask(12, 3, 6)},
    ),
    "SkyReelsV2Transformer3DModel": TinyClass(config=_ANYFLOW, inputs=_video_inputs),
    "WanAnimateTransformer3DModel": TinyClass(
        config={
            **_ANYFLOW,
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
        config={**_ANYFLOW, "vace_layers": [0, 1], "vace_in_channels": 12},
        inputs=lambda: {
            **_video_inputs(),
            "control_hidden_states": randn(2, 12, 4, 8, 8),
            "control_hidden_states_scale": torch.ones(2),
        },
    ),
}
