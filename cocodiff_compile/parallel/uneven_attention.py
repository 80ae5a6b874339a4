"""Runs Ulysses attention for tokens or heads that do not divide by the degree, under any processor.

A processor passes its `_parallel_config` through diffusers' `dispatch_attention_fn` to a diffusers
attention backend. `accept_uneven` wraps every such backend that can run Ulysses: the wrapper takes
over where the config is a `UlyssesConfig` and something does not divide, and passes every other
call on unchanged, so that an even call, or another model, traces to the same graph as without it.

    [B, S, H, D] -> pad heads -> exchange -> [B, N, h, D] -> drop padded keys and values
                 -> the backend, as on one process -> exchange -> drop padded heads -> [B, S, H, D]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _all_to_all_single,
    _AttentionBackendRegistry,
)

from cocodiff_compile.parallel.token_padding import Span, TokenPadding, keep_rows, missing, pad_end

_IS_OURS = "_cocodiff_accepts_uneven"


@dataclass
class SharedRanks(ContextParallelConfig):  # type: ignore[misc]
    """Holds the groups of a parallelised model; a deep copy of the model uses the same groups."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> SharedRanks:
        return self


@dataclass
class UlyssesConfig(ParallelConfig):  # type: ignore[misc]
    """Configures an attention of a parallelised model: its groups, and what its keys consist of."""

    padding: TokenPadding = field(default_factory=lambda: TokenPadding(1, ()))
    key_streams: tuple[str, ...] | None = None
    """The streams whose shares make up a rank's keys, in order; None if unknown."""

    def has_padded_keys(self) -> bool:
        """Returns whether keys are padded. Raises ValueError if that is unknown and tokens are."""
        if self.key_streams is not None:
            return self.padding.is_padded(self.key_streams)
        if self.padding.is_padded(self.padding.streams):
            raise ValueError(
                "Tokens do not divide by the Ulysses degree, and an attention's keys are not known "
                f"to be made of {list(self.padding.streams)} alone (an adapter's, say): pad the "
                f"tokens to a multiple of {self.padding.degree}, or choose another degree."
            )
        return False


def accept_uneven() -> None:
    """Wraps every attention backend of diffusers that can run Ulysses, once in a process."""
    registry = _AttentionBackendRegistry
    for value in sorted(registry._supports_context_parallel):
        name = AttentionBackendName(value)
        backend = registry._backends[name]
        if not hasattr(backend, _IS_OURS):
            registry._backends[name] = _in_front_of(backend)


def _in_front_of(backend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backend)
    def attend(**call: Any) -> Any:
        config = call.get("_parallel_config")
        if not isinstance(config, UlyssesConfig):
            return backend(**call)
        degree = config.context_parallel_config.ulysses_degree
        if call["query"].shape[2] % degree == 0 and not config.has_padded_keys():
            return backend(**call)
        return _attend_uneven(backend, config, call)

    setattr(attend, _IS_OURS, True)
    return attend


def _attend_uneven(
    backend: Callable[..., torch.Tensor], config: UlyssesConfig, call: dict[str, Any]
) -> torch.Tensor:
    query, key = call["query"], call["key"]
    degree, heads = config.context_parallel_config.ulysses_degree, query.shape[2]
    _refuse_unsupported(call)
    group = config.context_parallel_config._ulysses_mesh.get_group()
    spans: list[Span] = []
    if config.has_padded_keys():
        spans = config.padding.real_rows(config.key_streams or (), key.shape[1])
    whole = {name: _gather_tokens(call[name], degree, group) for name in ("query", "key", "value")}
    if spans:
        whole |= {name: keep_rows(whole[name], 1, spans) for name in ("key", "value")}
    mask = call.get("attn_mask")
    if mask is not None:
        whole["attn_mask"] = fit_mask(mask, spans, degree * query.shape[1], degree * key.shape[1])
    out = _gather_heads(backend(**{**call, **whole, "_parallel_config": None}), degree, group)
    return out[:, :, :heads] if heads % degree else out


def _refuse_unsupported(call: dict[str, Any]) -> None:
    if call.get("is_causal") or call.get("enable_gqa"):
        raise ValueError("Ulysses runs neither causal attention nor grouped queries here.")
    if torch.is_grad_enabled() and call["query"].requires_grad:
        raise ValueError(
            "Tokens or heads that do not divide by the Ulysses degree run for inference only: call "
            "the model under torch.no_grad() or torch.inference_mode()."
        )


def fit_mask(
    mask: torch.Tensor, spans: Sequence[Span], num_queries: int, num_keys: int
) -> torch.Tensor:
    """Returns a mask over the real keys, from one over all keys, padded ones included, or over the
    real ones.

    Raises ValueError for a mask of this rank's share, or one with a row per real query.
    """
    if mask.dim() > 2 and mask.shape[-2] not in (1, num_queries):
        raise ValueError(
            f"An attention mask of {mask.shape[-2]} rows does not fit {num_queries} queries, "
            "padded to divide by the number of ranks: pass a mask with one row for all queries, or "
            "choose a degree that divides the tokens."
        )
    if mask.shape[-1] == num_keys:
        return keep_rows(mask, mask.dim() - 1, spans) if spans else mask
    num_real = sum(stop - start for start, stop in spans)
    # Without interruption, the real keys are still in the order of the whole sequence.
    if len(spans) == 1 and mask.shape[-1] == num_real:
        return mask
    raise ValueError(
        f"An attention mask of {mask.shape[-1]} keys does not fit {num_keys} keys, padded to "
        "divide by the number of ranks: pass a mask over the whole sequence."
    )


def _gather_tokens(x: torch.Tensor, degree: int, group: Any) -> torch.Tensor:
    """Exchanges [B, S, H, D] of every rank to [B, N, h, D]; heads are padded to divide."""
    x = pad_end(x, 2, missing(x.shape[2], degree))
    batch, tokens, heads, size = x.shape
    packed = x.reshape(batch, tokens, degree, heads // degree, size).permute(2, 1, 0, 3, 4)
    received = _all_to_all_single(packed.contiguous(), group)
    return received.flatten(0, 1).permute(1, 0, 2, 3).contiguous()  # type: ignore[no-any-return]


def _gather_heads(x: torch.Tensor, degree: int, group: Any) -> torch.Tensor:
    """Exchanges [B, N, h, D] to [B, S, H, D], padded heads included."""
    batch, tokens, heads, size = x.shape
    packed = x.reshape(batch, degree, tokens // degree, heads, size).permute(1, 3, 0, 2, 4)
    received = _all_to_all_single(packed.contiguous(), group)
    return received.flatten(0, 1).permute(1, 2, 0, 3).contiguous()  # type: ignore[no-any-return]
