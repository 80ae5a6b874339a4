# SPDX-License-Identifier: Apache-2.0
"""Lists the transformers for audio and all else that `cocodiff coverage` builds tiny."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_rfd4_proteina import CONDITION_KEYS
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

from cocodiff_compile.lab.coverage.tiny import TinyClass


def _first_tokens(num_tokens: int, *num_kept: int) -> torch.Tensor:
    """Returns a mask [samples, tokens], True for the first tokens of each sample."""
    return torch.arange(num_tokens) < torch.tensor(num_kept).unsqueeze(1)


def _rotations(num_tokens: int, num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines [1, tokens, channels] of random angles, equal in pairs."""
    angles = torch.randn(1, num_tokens, num_channels // 2).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def _rfd4_proteina_inputs() -> dict[str, Any]:
    batch, tokens, atoms = 2, 32, 37
    padding_mask = _first_tokens(tokens, tokens, tokens - 4)
    required = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal_coord")
    molecules = (torch.arange(tokens) // 16).repeat(batch, 1)
    offsets = torch.arange(tokens)
    conditioning = {
        **{CONDITION_KEYS[name]: torch.randint(0, 4, (batch, tokens, atoms)) for name in required},
        CONDITION_KEYS["sequence"]: torch.zeros(batch, tokens, dtype=torch.long),
        CONDITION_KEYS["index_group"]: torch.zeros(batch, tokens, dtype=torch.long),
        "molecule_iid": molecules,
        "molecule_entity_id": molecules,
        "token_bond_path_length": (offsets - offsets[:, None]).abs().repeat(batch, 1, 1),
        "is_in_context_conditioning": torch.zeros_like(padding_mask),
        "supports_local_latent": torch.ones_like(padding_mask),
    }
    return {
        "bb_ca": torch.randn(batch, tokens, 3),
        "local_latents": torch.randn(batch, tokens, 8),
        "bb_ca_time": torch.full((batch,), 0.5),
        "local_latents_time": torch.full((batch,), 0.5),
        "padding_mask": padding_mask,
        "token_type": torch.zeros(batch, tokens, dtype=torch.long),
        "atom37_mask": torch.ones(batch, tokens, atoms, dtype=torch.bool),
        "conditioning": conditioning,
        "recycle_depth": 1,
    }


def _cosmos3_inputs() -> dict[str, Any]:
    text, frames, height, width = 16, 4, 4, 4
    vision = frames * height * width
    grid = torch.meshgrid(*map(torch.arange, (frames, height, width)), indexing="ij")
    vision_ids = torch.stack(grid).flatten(1) + torch.tensor([[text], [0], [0]])
    indexes = torch.arange(text, text + vision)
    return {
        "input_ids": torch.randint(0, 64, (text,)),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(text).repeat(3, 1), vision_ids], dim=1),
        "und_len": text,
        "sequence_length": text + vision,
        "vision_tokens": [torch.randn(1, 4, frames, 2 * height, 2 * width)],
        "vision_token_shapes": [(frames, height, width)],
        "vision_sequence_indexes": indexes,
        "vision_mse_loss_indexes": indexes,
        "vision_timesteps": torch.full((vision,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(frames)],
    }


def _sana_wm_inputs() -> dict[str, Any]:
    batch, frames, height, width = 2, 4, 4, 4
    poses = torch.eye(4).repeat(batch, frames, 1, 1)
    poses[..., :3, 3] = torch.randn(3) * torch.arange(frames).unsqueeze(1)
    lens = torch.tensor([4.0, 4.0, 2.0, 2.0]).expand(batch, frames, 4)
    timestep = torch.full((batch, 1, frames), 500.0)
    timestep[..., 0] = 0.0  # the first frame is given
    return {
        "hidden_states": torch.randn(batch, 4, frames, height, width),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(batch, 1, 12, 32),
        "mask": _first_tokens(12, 12, 9).long(),
        "data_info": {"img_hw": torch.tensor([[128.0, 128.0]])},
        "camera_conditions": torch.cat([poses.flatten(2), lens], dim=-1),
        "chunk_plucker": torch.randn(batch, 12, frames, height, width),
    }


def _sana_wm_refiner_inputs() -> dict[str, Any]:
    sink, history, tokens, channels = 16, 16, 64, 64
    cache = SanaWMRefinerKVCache(num_layers=2)
    cache.sink_pe = _rotations(sink, channels)
    for layer in range(len(cache)):
        cache.get(layer).store_sink(*torch.randn(2, 1, sink, channels))
        cache.get(layer).store_history(*torch.randn(2, 1, history, channels))
    return {
        "hidden_states": torch.randn(1, tokens, 8),
        "encoder_hidden_states": torch.randn(1, 12, 32),
        "timestep": torch.full((1, tokens), 500.0),
        "video_rotary_emb": _rotations(tokens, channels),
        "encoder_attention_mask": _first_tokens(12, 9).long(),
        "kv_cache": cache,
        "kv_cache_mode": "inject",
    }


OTHER_CLASSES: dict[str, TinyClass] = {
    "AceStepTransformer1DModel": TinyClass(
        config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "sliding_window": 16,
            "encoder_hidden_size": 32,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 128, 4),
            "timestep": torch.tensor([0.5, 0.5]),
            "timestep_r": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "context_latents": torch.randn(2, 128, 8),
        },
    ),
    "LongCatAudioDiTTransformer": TinyClass(
        config={
            "dit_dim": 64,
            "dit_depth": 2,
            "dit_heads": 4,
            "dit_text_dim": 32,
            "latent_dim": 8,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 64, 8),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "encoder_attention_mask": _first_tokens(12, 12, 9),
            "timestep": torch.tensor([0.5, 0.5]),
            "attention_mask": _first_tokens(64, 64, 64),
            "latent_cond": torch.zeros(2, 64, 8),
        },
    ),
    "MiniMaxMusic3RVQDepthDecoder": TinyClass(
        config={
            "hidden_size": 64,
            "num_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "audio_vocab_size": 16,
        },
        inputs=lambda: {"inputs_embeds": torch.randn(2, 8, 64)},
    ),
    "MiniMaxMusic3Transformer1DModel": TinyClass(
        config={
            "in_channels": 8,
            "condition_dim": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "ff_inner_dim": 128,
            "rotary_dim": 8,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 8, 63),  # the timestep is a token too
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 63, 32),
        },
    ),
    "PriorTransformer": TinyClass(
        config={
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "num_layers": 2,
            "embedding_dim": 32,
            "num_embeddings": 12,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 32),
            "timestep": torch.tensor(500),
            "proj_embedding": torch.randn(2, 32),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "attention_mask": _first_tokens(12, 12, 9),
        },
    ),
    "RFD4ProteinaTransformer": TinyClass(
        config={
            "nlayers": 2,
            "token_dim": 64,
            "nheads": 4,
            "dim_cond": 32,
            "pair_repr_dim": 16,
            "latent_dim": 8,
            "token_type_emb_dim": 8,
            "cath_emb_dim": 8,
            "t_emb_dim": 32,
            "tri_mult_c": 16,
        },
        inputs=_rfd4_proteina_inputs,
    ),
    "StableAudioDiTModel": TinyClass(
        config={
            "sample_size": 64,
            "in_channels": 8,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 8,
            "num_key_value_attention_heads": 4,
            "out_channels": 8,
            "cross_attention_dim": 64,
            "time_proj_dim": 32,
            "global_states_input_dim": 48,
            "cross_attention_input_dim": 32,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 8, 63),  # the duration is a token too
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "global_hidden_states": torch.randn(2, 1, 48),
            "rotary_embedding": get_1d_rotary_pos_embed(
                8, 64, use_real=True, repeat_interleave_real=False
            ),
        },
    ),
    "StableAudio3DiTModel": TinyClass(
        config={
            "io_channels": 8,
            "embed_dim": 64,
            "depth": 2,
            "num_heads": 4,
            "cond_token_dim": 32,
            "global_cond_dim": 32,
            "local_add_cond_dim": 9,
            "timestep_features_dim": 32,
            "num_memory_tokens": 16,
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 8, 64),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "global_hidden_states": torch.randn(2, 32),
            "encoder_attention_mask": _first_tokens(12, 12, 9),
        },
    ),
    "T5FilmDecoder": TinyClass(
        config={
            "input_dims": 8,
            "targets_length": 64,
            "d_model": 64,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 16,
            "d_ff": 128,
        },
        inputs=lambda: {
            "encodings_and_masks": [
                (torch.randn(1, 12, 64), _first_tokens(12, 9)),
                (torch.randn(1, 64, 64), _first_tokens(64, 64)),
            ],
            "decoder_input_tokens": torch.randn(1, 64, 8),
            "decoder_noise_time": torch.tensor([0.5]),
        },
    ),
    "TransformerTemporalModel": TinyClass(
        config={
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 32,
            "num_layers": 2,
            "norm_num_groups": 8,
        },
        inputs=lambda: {"hidden_states": torch.randn(2 * 16, 32, 8, 8), "num_frames": 16},
    ),
    "Cosmos3OmniTransformer": TinyClass(
        config={
            "head_dim": 16,
            "hidden_size": 128,
            "intermediate_size": 256,
            "latent_channel": 4,
            "latent_patch_size": 2,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "patch_latent_dim": 16,
            "vocab_size": 64,
            "rope_axes_dim": [4, 2, 2],
        },
        inputs=_cosmos3_inputs,
    ),
    "SanaVideoTransformer3DModel": TinyClass(
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
        },
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 12, 32),
            "timestep": torch.tensor([500.0, 500.0]),
            "encoder_attention_mask": _first_tokens(12, 12, 9).long(),
        },
    ),
    "SanaWMTransformer3DModel": TinyClass(
        config={
            "in_channels": 4,
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "chunk_plucker_channels": 12,
            "image_size": 128,
            "caption_channels": 32,
        },
        inputs=_sana_wm_inputs,
    ),
    "SanaWMLTX2RefinerTransformer3DModel": TinyClass(
        config={
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "cross_attention_dim": 64,
            "audio_in_channels": 8,
            "audio_out_channels": 8,
            "audio_num_attention_heads": 4,
            "audio_attention_head_dim": 16,
            "audio_cross_attention_dim": 64,
            "num_layers": 2,
            "caption_channels": 32,
        },
        inputs=_sana_wm_refiner_inputs,
    ),
}
