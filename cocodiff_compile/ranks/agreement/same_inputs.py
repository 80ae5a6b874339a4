"""Compares what the ranks of a group are called with, by digests: no tensor crosses the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.errors import UserError
from cocodiff_compile.ranks.agreement.all_ranks import gathered

_DIGESTED_WORDS = 1 << 19
"""How many words of 8 bytes are summed at once."""


def refuse_other_inputs(inputs: Mapping[int, Any], group: Any) -> None:
    """Raises UserError on every rank if a rank is called with other values than the first one.
    `inputs` are values by their place among all inputs.
    """
    everyone = gathered({place: _digest(value) for place, value in inputs.items()}, group)
    for rank, theirs in enumerate(everyone):
        for place, value in inputs.items():
            if everyone[0].get(place) != theirs.get(place):
                ranks = dist.get_process_group_ranks(group)
                raise UserError(
                    f"option 'shard': rank {ranks[rank]} was called with another value than rank "
                    f"{ranks[0]} in input {place} ({_described(value)}); every rank must have the "
                    "same weights and be called with the same inputs: seed random numbers alike"
                )


def _digest(value: Any) -> tuple[Any, ...]:
    """Returns a few numbers that tell values apart: sums of words, each times its place."""
    if not isinstance(value, torch.Tensor):
        return (repr(value),)
    flat = value.detach().contiguous().reshape(-1)
    memory = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have stride 0
    missing = -len(memory) % 8
    if missing or memory.storage_offset() % 8:
        memory = torch.nn.functional.pad(memory, (0, missing))
    places = torch.arange(1, _DIGESTED_WORDS + 1, device=memory.device)
    words = memory.view(torch.int64)
    begins = range(0, len(words), _DIGESTED_WORDS)
    parts = (words[begin : begin + _DIGESTED_WORDS] for begin in begins)
    sums = [(part * places[: len(part)]).sum() for part in parts]
    return (str(value.dtype), tuple(value.shape), *(torch.stack(sums).tolist() if sums else ()))


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
