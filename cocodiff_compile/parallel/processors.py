"""Defines attention processors that exchange heads, where a class's own do not or do it wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import FusedJointAttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor, apply_rotary_emb
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    apply_rotary_emb_qwen,
)
from torch import nn

from cocodiff_compile.parallel.mask_order import extend_mask, interleave_ranks

if TYPE_CHECKING:
    from cocodiff_compile.parallel.plans import ModelPlan


class _UlyssesProcessor:
    # diffusers looks for these two names, and sets them.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [batch, tokens, channels] from operands [batch, tokens, heads, head size]."""
        out: torch.Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        return out.flatten(2, 3).to(query.dtype)


class UlyssesJointAttnProcessor(_UlyssesProcessor):
    """Replaces SD3's JointAttnProcessor2_0, which calls SDPA itself, and exchanges heads."""

    def _image_legs(self, attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _image_legs(attn, x)

    def _text_legs(self, attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _text_legs(attn, x)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if attention_mask is not None:
            # The stock processor drops it in silence.
            raise ValueError("SD3's joint attention takes no attention_mask: leave it out.")
        num_image = hidden_states.shape[1]
        legs = self._image_legs(attn, hidden_states)
        if encoder_hidden_states is not None:
            text = self._text_legs(attn, encoder_hidden_states)
            legs = tuple(torch.cat(pair, dim=1) for pair in zip(legs, text, strict=True))
        joint = self._attend(*legs)
        image: torch.Tensor = attn.to_out[1](attn.to_out[0](joint[:, :num_image]))
        if encoder_hidden_states is None:
            return image
        text_out = joint[:, num_image:]
        return image, text_out if attn.context_pre_only else attn.to_add_out(text_out)


class UlyssesFusedJointAttnProcessor(UlyssesJointAttnProcessor):
    """Replaces FusedJointAttnProcessor2_0, with its one matmul, and exchanges heads."""

    def _image_legs(self, attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _legs(attn, attn.to_qkv(x).chunk(3, dim=-1))

    def _text_legs(self, attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _legs(attn, attn.to_added_qkv(x).chunk(3, dim=-1))


def _image_legs(attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    projected = (attn.to_q(x), attn.to_k(x), attn.to_v(x))
    return _legs(attn, projected, (attn.norm_q, attn.norm_k, None))


def _text_legs(attn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    projected = (attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x))
    return _legs(attn, projected, (attn.norm_added_q, attn.norm_added_k, None))


def _legs(
    attn: Any, projected: Sequence[Any], norms: Sequence[Any] = (None, None, None)
) -> tuple[torch.Tensor, ...]:
    legs = (leg.unflatten(2, (attn.heads, -1)) for leg in projected)
    return tuple(leg if norm is None else norm(leg) for leg, norm in zip(legs, norms, strict=True))


class UlyssesLTXAttnProcessor(_UlyssesProcessor):
    """Replaces LTXVideoAttnProcessor, but a mask keeps one head and its whole length.

    The stock processor repeats the mask for all heads, while a rank holds only its share of them.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states))
        key = attn.norm_k(attn.to_k(context))
        value = attn.to_v(context)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb)
            key = apply_rotary_emb(key, image_rotary_emb)
        query, key, value = (leg.unflatten(2, (attn.heads, -1)) for leg in (query, key, value))
        mask = None if attention_mask is None else attention_mask.unsqueeze(1)
        out = self._attend(query, key, value, mask)
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](out))
        return projected


class UlyssesLTX2AttnProcessor(_UlyssesProcessor):
    """Replaces LTX2AudioVideoAttnProcessor, but a mask keeps one head and its whole length."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        key_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        rotations = (query_rotary_emb, key_rotary_emb)
        value = attn.to_v(context)
        out = self._attend_rotated(attn, hidden_states, context, value, attention_mask, rotations)
        return _gate_and_project(attn, out, hidden_states)

    def _attend_rotated(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        rotations: tuple[Any, Any],
    ) -> torch.Tensor:
        query = attn.norm_q(attn.to_q(hidden_states))
        key = attn.norm_k(attn.to_k(context))
        of_query, of_key = rotations
        if of_query is not None:
            is_split = attn.rope_type == "split"
            rotate = apply_split_rotary_emb if is_split else apply_interleaved_rotary_emb
            query, key = (
                rotate(query, of_query),
                rotate(key, of_query if of_key is None else of_key),
            )
        query, key, value = (leg.unflatten(2, (attn.heads, -1)) for leg in (query, key, value))
        return self._attend(query, key, value, None if mask is None else mask.unsqueeze(1))


class UlyssesLTX2PerturbedAttnProcessor(UlyssesLTX2AttnProcessor):
    """Replaces LTX2PerturbedAttnProcessor in the same way."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        key_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: bool | torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        rotations = (query_rotary_emb, key_rotary_emb)
        value = attn.to_v(context)
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and torch.all(perturbation_mask == 0)
        if all_perturbed:
            return _gate_and_project(attn, value, hidden_states)
        out = self._attend_rotated(attn, hidden_states, context, value, attention_mask, rotations)
        if perturbation_mask is not None:
            out = torch.lerp(value, out, perturbation_mask)
        return _gate_and_project(attn, out, hidden_states)


def _gate_and_project(attn: Any, out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    if attn.to_gate_logits is not None:
        gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))
        size = out.shape[2] // attn.heads
        out = out * gates.repeat_interleave(size, dim=-1)
    projected: torch.Tensor = attn.to_out[1](attn.to_out[0](out))
    return projected


class UlyssesQwenAttnProcessor(_UlyssesProcessor):
    """Replaces QwenDoubleStreamAttnProcessor2_0, but takes the whole text mask, which every rank
    has.

    The stock processor takes this rank's share and gathers the rest over the network in every
    block, into a buffer of booleans on which Inductor's C++ code generation fails.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if attention_mask is not None:
            raise ValueError(
                "Qwen-Image's joint attention takes no attention_mask: pass the text's as "
                "encoder_hidden_states_mask."
            )
        num_text, num_image = encoder_hidden_states.shape[1], hidden_states.shape[1]
        image, text = _image_legs(attn, hidden_states), _text_legs(attn, encoder_hidden_states)
        if image_rotary_emb is not None:
            image = _rotate(image, image_rotary_emb[0])
            text = _rotate(text, image_rotary_emb[1])
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(text, image, strict=True))
        mask = self._joint_mask(encoder_hidden_states_mask, num_text, num_image)
        joint = self._attend(query, key, value, mask)
        image_out: torch.Tensor = joint[:, num_text:].contiguous()
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(joint[:, :num_text].contiguous())

    def _joint_mask(
        self, text_mask: torch.Tensor | None, num_text: int, num_image: int
    ) -> torch.Tensor | None:
        """Returns a mask [batch, 1, 1, tokens] in the order after the exchange, ones for images."""
        if text_mask is None:
            return None
        degree = self._parallel_config.context_parallel_config.ulysses_degree
        image_mask = text_mask.new_ones((text_mask.shape[0], degree * num_image))
        text_mask = extend_mask(text_mask, degree * num_text - text_mask.shape[1])
        joint = torch.cat([text_mask, image_mask], dim=1)
        return interleave_ranks(joint, num_text, num_image, degree)[:, None, None]


def _rotate(legs: tuple[torch.Tensor, ...], freqs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key, value = legs
    query, key = (apply_rotary_emb_qwen(leg, freqs, use_real=False) for leg in (query, key))
    return query, key, value


# By exact type: what a subclass changes is unknown here.
REPLACED: Mapping[type, type[_UlyssesProcessor]] = {
    JointAttnProcessor2_0: UlyssesJointAttnProcessor,
    FusedJointAttnProcessor2_0: UlyssesFusedJointAttnProcessor,
    LTX2AudioVideoAttnProcessor: UlyssesLTX2AttnProcessor,
    LTX2PerturbedAttnProcessor: UlyssesLTX2PerturbedAttnProcessor,
    LTXVideoAttnProcessor: UlyssesLTXAttnProcessor,
    QwenDoubleStreamAttnProcessor2_0: UlyssesQwenAttnProcessor,
}


def _register_for_hooks() -> None:
    """Makes diffusers' hooks that skip an attention treat these processors like the stock ones."""
    AttentionProcessorRegistry._register()
    for stock, ours in REPLACED.items():
        if stock in AttentionProcessorRegistry._registry:
            metadata = AttentionProcessorRegistry.get(stock)
            AttentionProcessorRegistry.register(model_class=ours, metadata=metadata)


def replace_processors(model: nn.Module, plan: ModelPlan) -> None:
    """Replaces the stock processors of sharded attentions where `REPLACED` has another one."""
    _register_for_hooks()
    for name, module in model.named_modules():
        stock: Any = getattr(module, "processor", None)
        if type(stock) in REPLACED and not plan.is_whole(name):
            ours: Any = REPLACED[type(stock)]()
            ours._attention_backend = getattr(stock, "_attention_backend", None)
            module.processor = ours
