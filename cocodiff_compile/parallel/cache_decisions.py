"""Makes the decisions of diffusers' caches the same on all ranks.

A cache that skips blocks on one rank and runs them on another leaves the second rank in an exchange
that nobody joins. Most caches decide from the step number, which is the same everywhere:
TaylorSeer, Pyramid Attention Broadcast, FasterCache, and MagCache with given ratios. SeaCache
decides from the whole latents, which every rank has. First Block Cache decides from how much the
tokens of the first block changed, and MagCache measures its ratios from tokens. A rank has only a
share of these, so that sums are added over the ranks, without the rows that pad the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import ContextParallelConfig
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from diffusers.hooks.mag_cache import MagCacheBlockHook
from torch import distributed as dist
from torch import nn

from cocodiff_compile.parallel.token_padding import IMAGE, TokenPadding

_RankSums = Callable[[torch.Tensor], torch.Tensor]


def make_decisions_common(
    modules: Sequence[nn.Module], config: ContextParallelConfig, padding: TokenPadding
) -> None:
    """Makes the cache hooks of `modules` decide from the tokens of all ranks."""
    sums = partial(_sum_over_ranks, config=config, padding=padding)
    for module in modules:
        registry: Any = module.__dict__.get("_diffusers_hook")
        for hook in [] if registry is None else registry.hooks.values():
            if type(hook) is FBCHeadBlockHook:
                hook._should_compute_remaining_blocks = partial(_should_compute, hook, sums)
            elif type(hook) is MagCacheBlockHook:
                hook._perform_calibration_step = partial(_calibrate, sums)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _should_compute(hook: FBCHeadBlockHook, sums: _RankSums, residual: torch.Tensor) -> bool:
    """Replaces FBCHeadBlockHook._should_compute_remaining_blocks, over the tokens of all ranks."""
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    per_token = [x.abs().sum(-1, dtype=torch.float32) for x in (residual - before, before)]
    change, size = sums(torch.stack(per_token))
    return bool(change / size > hook.threshold)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _calibrate(sums: _RankSums, state: Any, residual: torch.Tensor) -> None:
    """Replaces MagCacheBlockHook._perform_calibration_step, over the tokens of all ranks."""
    ratio = 1.0
    if state.previous_residual is not None:
        now = torch.linalg.norm(residual.float(), dim=-1)
        before = torch.linalg.norm(state.previous_residual.float(), dim=-1)
        total, count = sums(torch.stack([now / (before + 1e-8), torch.ones_like(now)])).tolist()
        ratio = total / count
    state.calibration_ratios.append(ratio)


def _sum_over_ranks(
    per_token: torch.Tensor, *, config: ContextParallelConfig, padding: TokenPadding
) -> torch.Tensor:
    """Reduces [numbers, batch, this rank's tokens] to sums over all real tokens, the same on every
    rank.

    Values are gathered and then added in the order of the ranks, so that the sums are equal bit for
    bit.
    """
    group = config._ulysses_mesh.get_group()
    rows = padding.real_share(IMAGE, per_token.shape[-1], dist.get_rank(group))
    mine = per_token[..., :rows].sum(dim=(1, 2))
    theirs = [torch.empty_like(mine) for _ in range(config.ulysses_degree)]
    dist.all_gather(theirs, mine, group=group)
    return torch.stack(theirs).sum(0)
