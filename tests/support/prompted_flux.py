# SPDX-License-Identifier: Apache-2.0
"""A whole FLUX pipeline, tiny and with random weights, which takes prompts as text."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch

from cocodiff_compile.lab.small_model_inputs import (
    LATENT_CHANNELS,
    POOLED_CHANNELS,
    TEXT_CHANNELS,
)
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.lab.tiny_pipelines import flux_parts, vae

CLIP_TOKENS = 77


def prompted_flux(
    _name: str = "", *, torch_dtype: torch.dtype = torch.float32, **_others: object
) -> Any:
    """Returns the pipeline, as `FluxPipeline.from_pretrained` would if there were weights; pictures
    are of 128 x 128 unless a call says otherwise.
    """
    from diffusers import FluxPipeline  # noqa: PLC0415  (slow, and optional)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "vae": vae(LATENT_CHANNELS // 4, block_out_channels=(4, 4, 8, 8)),
            # Wide enough that it pays to share its tokens out over two ranks of one machine.
            "transformer": SMALL_MODELS["flux"].build(num_layers=1, heads=8, head_size=64),
        }
        pipe = FluxPipeline(**{**flux_parts(), **parts, **_clip(), **_t5()})
    pipe.default_sample_size = 16
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch_dtype)


def _clip() -> dict[str, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer  # noqa: PLC0415

    ends = ("<|startoftext|>", "<|endoftext|>")
    words = [*ends, *ascii_lowercase, *(f"{letter}</w>" for letter in ascii_lowercase)]
    vocabulary = {word: number for number, word in enumerate(words)}
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=POOLED_CHANNELS,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return {
        "tokenizer": CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_TOKENS),
        "text_encoder": CLIPTextModel(config).eval(),
    }


def _t5() -> dict[str, Any]:
    from transformers import T5Config, T5EncoderModel, T5Tokenizer  # noqa: PLC0415

    ends = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    words = [*ends, *((letter, -2.0) for letter in ascii_lowercase)]
    config = T5Config(
        vocab_size=len(words), d_model=TEXT_CHANNELS, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return {
        "tokenizer_2": T5Tokenizer(vocab=words, extra_ids=0),
        "text_encoder_2": T5EncoderModel(config).eval(),
    }
