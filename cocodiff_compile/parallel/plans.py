"""Where the tokens of each diffusers class are split and gathered.

diffusers has a plan for some classes (`_cp_plan`). Here are those it has none for, and those whose
own is wrong. A plan maps a module's name to what is split of its inputs or outputs, or to what is
gathered of its outputs, or to None: the module runs on whole sequences.
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
    HUNYUAN_STREAMS,
    LTX_STREAMS,
    QWEN_STREAMS,
    SD3_STREAMS,
    WAN_STREAMS,
    Z_IMAGE_STREAMS,
    TokenStreams,
)


@dataclass(frozen=True)
class ModelPlan:
    """All that is done to a model; `prepare` makes it traceable in one graph."""

    shards: Mapping[str, Any]
    whole: frozenset[str] = field(default_factory=frozenset)
    masks: tuple[JointMask, ...] = ()
    prepare: Callable[[nn.Module], None] | None = None
    streams: TokenStreams | None = None

    def is_whole(self, module_name: str) -> bool:
        """Whether the module, or one that holds it, runs on whole sequences."""
        parts = module_name.split(".")
        return any(".".join(parts[: i + 1]) in self.whole for i in range(len(parts)))


def plan_for(model: nn.Module, plan: Mapping[str, Any] | None) -> ModelPlan:
    """The user's plan, else the shipped one, else diffusers' own; ValueError if there is none."""
    shipped = _SHIPPED.get(type(model).__name__, _Shipped())
    entries = plan
    if entries is None and shipped.plan is not None:
        entries = shipped.plan(model)
    if entries is None:
        entries = getattr(model, "_cp_plan", None)
    if entries is None:
        raise ValueError(
            f"There is no context-parallel plan for {type(model).__name__}: pass `plan=`, a "
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
        },
        "proj_out": _GATHER,
    }


def _qwen_image(model: nn.Module) -> Mapping[str, Any]:
    # The mask stays whole: our processor joins it with the image's on every rank alike.
    plan: Mapping[str, Any] = model._cp_plan  # type: ignore[assignment]
    whole = "encoder_hidden_states_mask"
    return {
        name: {key: split for key, split in entry.items() if key != whole}
        if isinstance(entry, Mapping)
        else entry
        for name, entry in plan.items()
    }


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
    for name in final:
        plan[f"all_final_layer.{name}"] = {"noise_mask": _input(2)}
        plan[f"all_final_layer.{name}.linear"] = _GATHER
    return plan


def _fill_z_image_rope(model: nn.Module) -> None:
    """Its table is made at the first call, which a graph can neither trace nor keep."""
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
    "FluxTransformer2DModel": _Shipped(streams=FLUX_STREAMS),
    "Flux2Transformer2DModel": _Shipped(streams=FLUX_STREAMS),
    "WanTransformer3DModel": _Shipped(streams=WAN_STREAMS),
    "ChronoEditTransformer3DModel": _Shipped(streams=WAN_STREAMS),
    "SD3Transformer2DModel": _Shipped(_sd3, streams=SD3_STREAMS),
    "ChromaTransformer2DModel": _Shipped(
        _flux, masks=(JointMask("", text_first=True),), streams=FLUX_STREAMS
    ),
    "LTXVideoTransformer3DModel": _Shipped(_ltx, streams=LTX_STREAMS),
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
