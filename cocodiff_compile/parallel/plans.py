"""Defines where the tokens of each diffusers class are split and gathered.

diffusers has a plan for some classes (`_cp_plan`). This module holds plans for classes that have
none or a wrong one. A plan maps the name of a module to the inputs or outputs that are split, or to
the outputs that are gathered, or to None for a module that runs on whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import nn

from cocodiff_compile.parallel.mask_order import JointMask
from cocodiff_compile.parallel.streams import (
    FLUX_STREAMS,
    HELIOS_STREAMS,
    HUNYUAN_STREAMS,
    LTX2_STREAMS,
    LTX_STREAMS,
    MINIMAX_H3_STREAMS,
    QWEN_STREAMS,
    SD3_STREAMS,
    WAN_STREAMS,
    Z_IMAGE_STREAMS,
    TokenStreams,
)


@dataclass(frozen=True)
class ModelPlan:
    """Holds all changes to a model; `prepare` makes it traceable in one graph."""

    shards: Mapping[str, Any]
    whole: frozenset[str] = field(default_factory=frozenset)
    masks: tuple[JointMask, ...] = ()
    prepare: Callable[[nn.Module], None] | None = None
    streams: TokenStreams | None = None

    @property
    def splits_inputs(self) -> bool:
        """Returns whether tokens are split as they enter the model, and not further inside."""
        splits = self.shards.get("", {})
        return any(
            self.streams is None or self.streams.split_at("", key) is not None for key in splits
        )

    def is_whole(self, module_name: str) -> bool:
        """Returns whether the module, or one that contains it, runs on whole sequences."""
        parts = module_name.split(".")
        return any(".".join(parts[: i + 1]) in self.whole for i in range(len(parts)))


def plan_for(model: nn.Module, plan: Mapping[str, Any] | None) -> ModelPlan:
    """Returns the user's plan, else the shipped one. Raises ValueError if there is none."""
    name = type(model).__name__
    shipped = _SHIPPED.get(name, _Shipped())
    entries = plan
    if entries is None and shipped.plan is not None:
        entries = shipped.plan(model)
    own = getattr(model, "_cp_plan", None)
    if entries is None and name in _SHIPPED:
        entries = own
    if entries is None and own is not None:
        raise ValueError(
            f"The context-parallel plan that diffusers has for {name} was never compared with "
            "one process by this project: pass plan=model._cp_plan to use it, and compare the "
            "result once."
        )
    if entries is None:
        raise ValueError(
            f"There is no context-parallel plan for {name}: pass `plan=`, a "
            "mapping from module names to ContextParallelInput and ContextParallelOutput as in "
            "diffusers' `_cp_plan` (FluxTransformer2DModel has a short one)."
        )
    return ModelPlan(
        shards={name: entry for name, entry in entries.items() if entry is not None},
        whole=frozenset(name for name, entry in entries.items() if entry is None),
        masks=shipped.masks,
        prepare=shipped.prepare,
        streams=shipped.streams if plan is None else None,
    )


def _input(dims: int, dim: int = 1) -> ContextParallelInput:
    return ContextParallelInput(split_dim=dim, expected_dims=dims)


def _output_of(dims: int, dim: int = 1) -> ContextParallelInput:
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=True)


_GATHER = ContextParallelOutput(gather_dim=1, expected_dims=3)


def _sd3(_model: nn.Module) -> Mapping[str, Any]:
    # Behind the embedders, not at block 0: `skip_layers` may skip that, and blocks stay alike.
    return {
        "": {"block_controlnet_hidden_states": _input(3)},
        "pos_embed": {0: _output_of(3)},
        "context_embedder": {0: _output_of(3)},
        "proj_out": _GATHER,
    }


def _flux(_model: nn.Module) -> Mapping[str, Any]:
    return {
        "": {
            "hidden_states": _input(3),
            "encoder_hidden_states": _input(3),
            "img_ids": _input(2, dim=0),
            "txt_ids": _input(2, dim=0),
            "controlnet_block_samples": _input(3),
            "controlnet_single_block_samples": _input(3),
        },
        "proj_out": _GATHER,
    }


def _qwen_image(model: nn.Module) -> Mapping[str, Any]:
    # The mask stays whole: our processor joins it with the image's on every rank alike.
    plan: Mapping[str, Any] = model._cp_plan  # type: ignore[assignment]
    whole = "encoder_hidden_states_mask"
    split = {
        name: {key: split for key, split in entry.items() if key != whole}
        if isinstance(entry, Mapping)
        else entry
        for name, entry in plan.items()
    }
    return {"": {"controlnet_block_samples": _input(3)}, **split}


def _ltx(_model: nn.Module) -> Mapping[str, Any]:
    # The mask stays whole: the keys it belongs to are whole after the exchange.
    return {
        "": {
            "hidden_states": _input(3),
            "encoder_hidden_states": _input(3),
            "timestep": _input(2),
        },
        "rope": {0: _output_of(3), 1: _output_of(3)},
        "proj_out": _GATHER,
    }


def _ltx2(model: nn.Module) -> Mapping[str, Any]:
    # diffusers' own leaves the audio whole, and with it attentions whose queries are.
    config: Any = model.config
    rope = _output_of(3) if config.rope_type == "interleaved" else _output_of(4, dim=2)
    tokens = ("hidden_states", "audio_hidden_states", "video_keyframes_mask")
    texts = ("encoder_hidden_states", "audio_encoder_hidden_states")
    ropes = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
    return {
        "": {
            **{name: _input(3) for name in (*tokens, *texts)},
            "timestep": _input(2),
            "audio_timestep": _input(2),
        },
        **{name: {0: rope, 1: rope} for name in ropes},
        "proj_out": _GATHER,
        "audio_proj_out": _GATHER,
    }


def _helios(model: nn.Module) -> Mapping[str, Any]:
    # As diffusers' own, which gathers in 40 blocks, however many there are.
    blocks: Any = model.blocks
    parts = ("attn1", "attn2", "ffn")
    splits = {f"blocks.*.{part}": {"hidden_states": _input(3)} for part in parts}
    splits["blocks.*.attn1"]["rotary_emb"] = _input(3)
    return {
        **splits,
        **{f"blocks.{i}.{part}": _GATHER for i in range(len(blocks)) for part in parts},
    }


def _minimax_h3(model: nn.Module) -> Mapping[str, Any]:
    # Text alone is whole on every rank: its refiner has nothing to exchange.
    plan: Mapping[str, Any] = model._cp_plan  # type: ignore[assignment]
    return {"token_refiner": None, **plan}


def _hunyuan_video(_model: nn.Module) -> Mapping[str, Any]:
    # Not behind the embedders: the model sizes its mask by the whole sequence before block 0.
    return {
        "context_embedder": None,
        "rope": {0: _output_of(2, dim=0), 1: _output_of(2, dim=0)},
        "transformer_blocks.0": {"hidden_states": _input(3), "encoder_hidden_states": _input(3)},
        "proj_out": _GATHER,
    }


def _z_image(model: nn.Module) -> Mapping[str, Any]:
    # Text alone is short and not padded to the degree: its refiners run whole on every rank.
    plan: dict[str, Any] = {"context_refiner": None, "siglip_refiner": None}
    per_token = {"freqs_cis": _input(3), "noise_mask": _input(2)}
    refiner: Any = model.noise_refiner
    if len(refiner) > 0:
        plan["noise_refiner.*"] = per_token
        plan[f"noise_refiner.{len(refiner) - 1}"] = _GATHER
        # One name holds one entry: a lone block, which gathers, splits under the other name.
        splits_x = "noise_refiner.*" if len(refiner) == 1 else "noise_refiner.0"
        plan[splits_x] = {**plan.get(splits_x, {}), "x": _input(3)}
    plan |= {"layers.0": {"x": _input(3)}, "layers.*": per_token}
    final: Any = model.all_final_layer
    plan[""] = {"controlnet_block_samples": _input(3)}
    for name in final:
        plan[f"all_final_layer.{name}"] = {"noise_mask": _input(2)}
        plan[f"all_final_layer.{name}.linear"] = _GATHER
    return plan


def _fill_z_image_rope(model: nn.Module) -> None:
    """Fills the RoPE table, which a graph can neither trace nor keep if made at the first call."""
    rope: Any = model.rope_embedder
    if rope.freqs_cis is None:
        device = next(model.parameters()).device
        tables = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)
        rope.freqs_cis = [table.to(device) for table in tables]


@dataclass(frozen=True)
class _Shipped:
    plan: Callable[[nn.Module], Mapping[str, Any]] | None = None
    masks: tuple[JointMask, ...] = ()
    prepare: Callable[[nn.Module], None] | None = None
    streams: TokenStreams | None = None


_SHIPPED: Mapping[str, _Shipped] = {
    "FluxTransformer2DModel": _Shipped(_flux, streams=FLUX_STREAMS),
    "Flux2Transformer2DModel": _Shipped(streams=FLUX_STREAMS),
    "WanTransformer3DModel": _Shipped(streams=WAN_STREAMS),
    "ChronoEditTransformer3DModel": _Shipped(streams=WAN_STREAMS),
    "SD3Transformer2DModel": _Shipped(_sd3, streams=SD3_STREAMS),
    "ChromaTransformer2DModel": _Shipped(
        _flux, masks=(JointMask("", text_first=True),), streams=FLUX_STREAMS
    ),
    "LTXVideoTransformer3DModel": _Shipped(_ltx, streams=LTX_STREAMS),
    "LTX2VideoTransformer3DModel": _Shipped(_ltx2, streams=LTX2_STREAMS),
    "HeliosTransformer3DModel": _Shipped(_helios, streams=HELIOS_STREAMS),
    "MiniMaxH3Transformer3DModel": _Shipped(_minimax_h3, streams=MINIMAX_H3_STREAMS),
    "QwenImageTransformer2DModel": _Shipped(_qwen_image, streams=QWEN_STREAMS),
    "HunyuanVideoTransformer3DModel": _Shipped(
        _hunyuan_video,
        masks=(
            JointMask("transformer_blocks", text_first=False),
            JointMask("single_transformer_blocks", text_first=False),
        ),
        streams=HUNYUAN_STREAMS,
    ),
    "ZImageTransformer2DModel": _Shipped(
        _z_image, prepare=_fill_z_image_rope, streams=Z_IMAGE_STREAMS
    ),
}
