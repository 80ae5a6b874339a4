# SPDX-License-Identifier: Apache-2.0
"""Compares what the ranks of a group are called with, by digests: no tensor crosses the network.

The digests go through the store, under the number of the call over the group that follows. A rank
that compares nothing before this call, since it did not compile anew, soon waits in a collective
of it: its watch thread answers for it (`answer_inputs`), so that a rank may compile alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist

from cocodiff_compile.errors import PeerError
from cocodiff_compile.ranks.agreement.rank_state import GroupState, Ranks, group_key, rank_state
from cocodiff_compile.ranks.agreement.waiting import (
    explain_store_errors,
    linger_until_read,
    wait_for,
)
from cocodiff_compile.ranks.agreement.world import world_store

_DIGESTED_WORDS = 1 << 19
"""How many words of 8 bytes are summed at once."""
_COMPARES_NOTHING = "null"


def refuse_other_inputs(inputs: Mapping[str, Any], ranks: Ranks) -> None:
    """Raises UserError on every rank if a rank is about to call the same with other values.
    `inputs` are values by what they are called in a message. The ranks must be real.
    """
    group, store, rank = rank_state.get().group(ranks), world_store(), dist.get_rank()
    number = group.calls + 1
    count = group.input_rounds = group.input_rounds + 1 if group.input_call == number else 0
    group.input_call = number
    keys = {other: _key(ranks, number, count, other) for other in ranks}
    own = {name: digest(value) for name, value in inputs.items()}
    with explain_store_errors():
        store.set(keys[rank], json.dumps(own))
        store.set(_asked_key(ranks, number, count), "")
        wait_for(keys, f"the comparison of the inputs of call {number}")
        given = {other: json.loads(store.get(key)) for other, key in keys.items()}
        if difference := _difference(given):
            store.set(f"{keys[rank]}/read", "")
            linger_until_read([f"{key}/read" for key in keys.values()])
            raise PeerError(difference)
        if group.last_inputs:
            store.delete_key(group.last_inputs)  # all have read it, since they came here
        group.last_inputs = keys[rank]


def answer_inputs(ranks: Ranks, group: GroupState) -> None:
    """Tells ranks that compare the inputs of the call that this one is in, that it does not."""
    store, number = world_store(), group.calls
    first = group.input_rounds + 1 if group.input_call == number else 0
    for count in itertools.count(first):
        if not store.check([_asked_key(ranks, number, count)]):
            return
        own = _key(ranks, number, count, dist.get_rank())
        if not store.check([own]):
            store.set(own, _COMPARES_NOTHING)


def _difference(given: Mapping[int, Any]) -> str:
    """Returns the first input of which ranks have different digests, in words: the same on every
    rank.
    """
    comparing = {rank: digests for rank, digests in given.items() if digests is not None}
    first = next(iter(comparing))
    for rank, theirs in comparing.items():
        for name in dict.fromkeys((*comparing[first], *theirs)):
            ours, other = comparing[first].get(name), theirs.get(name)
            if ours != other:
                return (
                    f"option 'shard': rank {rank} was called with another value than rank {first} "
                    f"in {name} ({_described(other, ours)}); every rank must have the same "
                    "weights and be called with the same inputs: seed random numbers alike"
                )
    return ""


def _key(ranks: Ranks, number: int, count: int, rank: int) -> str:
    return f"cocodiff/inputs/{group_key(ranks)}/{number}.{count}/{rank}"


def _asked_key(ranks: Ranks, number: int, count: int) -> str:
    return f"cocodiff/inputs/{group_key(ranks)}/{number}.{count}/asked"


def digest(value: Any) -> list[Any]:
    """Returns a few numbers that tell values apart: sums of words, each hashed with its place."""
    if not isinstance(value, torch.Tensor):
        return [value if isinstance(value, str) else repr(value)]
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    memory = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have stride 0
    missing = -len(memory) % 8
    if missing or memory.storage_offset() % 8:
        memory = torch.nn.functional.pad(memory, (0, missing))
    places = torch.arange(1, _DIGESTED_WORDS + 1, device=memory.device)
    words = memory.view(torch.int64)
    begins = range(0, len(words), _DIGESTED_WORDS)
    parts = (words[begin : begin + _DIGESTED_WORDS] for begin in begins)
    sums = [_hashed(_hashed(part) + places[: len(part)]).sum() for part in parts]
    return [str(value.dtype), list(value.shape), *(torch.stack(sums).tolist() if sums else ())]


def _hashed(words: torch.Tensor) -> torch.Tensor:
    """Returns other words, in each of which every bit depends on all bits of the one before."""
    for factor in (-7046029254386353131, -4658895280553007687):
        upper = (words >> 32) & 0xFFFFFFFF
        words = (words ^ upper) * factor
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def _described(theirs: list[Any] | None, ours: list[Any] | None) -> str:
    """Describes an input of which two ranks have these digests."""
    texts = dict.fromkeys(map(_text, (theirs, ours)))
    return " instead of ".join(texts)


def _text(digest: list[Any] | None) -> str:
    if digest is None:
        return "nothing"
    if len(digest) == 1:
        return str(digest[0])
    return f"{digest[1]} {digest[0].removeprefix('torch.')}"
