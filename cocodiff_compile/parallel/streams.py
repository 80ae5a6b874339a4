"""Defines the token streams of each model: where they are split and gathered, and which of them
keys consist of.

They are needed only where tokens do not divide by the degree: padding is then a part of every key
and value, and an attention cannot recognise it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cocodiff_compile.parallel.token_padding import IMAGE, TEXT

_UNIFIED = "unified"
_AUDIO, _AUDIO_TEXT = "audio", "audio text"

T = TypeVar("T")


@dataclass(frozen=True)
class TokenStreams:
    """Describes the streams of a model. `splits` maps (module, input or output) to the stream that
    is split there; anything else that a plan splits has one entry per token of a stream. `gathers`
    maps modules, as a regular expression of names, to the stream gathered there. `keys` maps
    attentions, likewise, to the streams that a rank joins to its keys, in order.
    """

    splits: Mapping[tuple[str, str | int], str]
    gathers: Mapping[str, str]
    keys: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.splits.values()))

    def split_at(self, module: str, key: str | int) -> str | None:
        return self.splits.get((module, key))

    def gathered_at(self, module: str) -> str | None:
        return _first_match(self.gathers, module)

    def keys_of(self, attention: str, processor: Any) -> tuple[str, ...] | None:
        """Returns the streams of an attention's keys; None if unknown, as with adapters."""
        if "IPAdapter" in type(processor).__name__:
            return None
        return _first_match(self.keys, attention)


def _first_match(by_pattern: Mapping[str, T], name: str) -> T | None:
    return next((v for pattern, v in by_pattern.items() if re.fullmatch(pattern, name)), None)


def _joint(module: str, keys: Mapping[str, tuple[str, ...]]) -> TokenStreams:
    return TokenStreams(
        splits={(module, "hidden_states"): IMAGE, (module, "encoder_hidden_states"): TEXT},
        gathers={"proj_out": IMAGE},
        keys=keys,
    )


FLUX_STREAMS = _joint("", {".*": (TEXT, IMAGE)})
QWEN_STREAMS = _joint("transformer_blocks.0", {".*": (TEXT, IMAGE)})
HUNYUAN_STREAMS = _joint("transformer_blocks.0", {".*": (IMAGE, TEXT)})
LTX_STREAMS = _joint("", {r".*\.attn1": (IMAGE,), r".*\.attn2": (TEXT,)})
SD3_STREAMS = TokenStreams(
    splits={("pos_embed", 0): IMAGE, ("context_embedder", 0): TEXT},
    gathers={"proj_out": IMAGE},
    keys={r".*\.attn": (IMAGE, TEXT), r".*\.attn2": (IMAGE,)},
)
# The cross-attention of these exchanges nothing.
WAN_STREAMS = TokenStreams(
    splits={("blocks.0", "hidden_states"): IMAGE},
    gathers={"proj_out": IMAGE},
    keys={r".*\.attn1": (IMAGE,)},
)
# Text and image are one sequence before the layers split it; the plan names one of the two splits
# of the refiner.
Z_IMAGE_STREAMS = TokenStreams(
    splits={
        ("noise_refiner.0", "x"): IMAGE,
        ("noise_refiner.*", "x"): IMAGE,
        ("layers.0", "x"): _UNIFIED,
    },
    gathers={r"noise_refiner\..*": IMAGE, r"all_final_layer\..*": _UNIFIED},
    keys={r"noise_refiner\..*": (IMAGE,), r"layers\..*": (_UNIFIED,)},
)
# Video and audio attend to themselves, to their own text and to each other.
LTX2_STREAMS = TokenStreams(
    splits={
        ("", "hidden_states"): IMAGE,
        ("", "encoder_hidden_states"): TEXT,
        ("", "audio_hidden_states"): _AUDIO,
        ("", "audio_encoder_hidden_states"): _AUDIO_TEXT,
    },
    gathers={"proj_out": IMAGE, "audio_proj_out": _AUDIO},
    keys={
        r".*\.attn1": (IMAGE,),
        r".*\.attn2": (TEXT,),
        r".*\.audio_attn1": (_AUDIO,),
        r".*\.audio_attn2": (_AUDIO_TEXT,),
        r".*\.audio_to_video_attn": (_AUDIO,),
        r".*\.video_to_audio_attn": (IMAGE,),
    },
)
# Whole between its parts, each of which splits what it is given and gathers what it returns: the
# cross-attention, which exchanges nothing, may be given fewer tokens than the others.
_HELIOS_PARTS = {"attn1": IMAGE, "attn2": "cross-attended", "ffn": "fed forward"}
HELIOS_STREAMS = TokenStreams(
    splits={(f"blocks.*.{part}", "hidden_states"): name for part, name in _HELIOS_PARTS.items()},
    gathers={rf"blocks\.\d+\.{part}": name for part, name in _HELIOS_PARTS.items()},
    keys={r".*\.attn1": (IMAGE,)},
)
MINIMAX_H3_STREAMS = TokenStreams(
    splits={("transformer_blocks.0", "hidden_states"): _UNIFIED},
    gathers={"(audio_)?proj_out": _UNIFIED},
    keys={r"transformer_blocks\..*": (_UNIFIED,)},
)
