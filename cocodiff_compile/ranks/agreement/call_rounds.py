# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a group compare what they are about to run.

The n-th call over a group is compared if this rank runs something else in it than in its last call
over the group: in its first call, and after a recompilation or a change of shapes. The other ranks
then change too, and all meet in the store. A rank that does not change publishes nothing and soon
waits in its collective for the ranks that compare; its watch thread answers for it (`answer`). So
all ranks have the same facts, and a difference is the same error on every rank. A call that runs
the same as the last one costs no message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from cocodiff_compile.errors import PeerError
from cocodiff_compile.ranks.agreement.compile_rounds import (
    asked_key,
    difference_of,
    first_difference,
    record,
    round_key,
)
from cocodiff_compile.ranks.agreement.rank_state import (
    GroupState,
    Ranks,
    RankState,
    RunPlan,
    group_key,
    rank_state,
)
from cocodiff_compile.ranks.agreement.waiting import (
    explain_store_errors,
    linger_until_read,
    wait_for,
)
from cocodiff_compile.ranks.agreement.world import world_store

DOES_RUN = ("what they do", "runs code that was compiled before")


@dataclass(frozen=True)
class _Call:
    """Identifies one call of this rank over one group."""

    ranks: Ranks
    number: int
    plan: RunPlan

    @property
    def keys(self) -> dict[int, str]:
        return {rank: _call_key(self.ranks, self.number, rank) for rank in self.ranks}


def begin_call(plans: Mapping[Ranks, RunPlan], own: RankState) -> None:
    """Counts a call over these groups. Where this rank's plan changed, the ranks compare it."""
    changed = []
    for ranks, plan in plans.items():
        group = own.group(ranks)
        group.calls += 1
        if group.plan is plan:
            continue
        if group.plan is None or group.plan.digest != plan.digest:
            changed.append(_Call(ranks, group.calls, plan))
        group.plan = plan
    if not changed:
        return
    with explain_store_errors():
        for call in changed:
            _publish(call)
            world_store().set(_asked_key(call.ranks, call.number), "")
        for call in changed:
            _compare(call)


def _publish(call: _Call) -> None:
    """Publishes a plan once, and for each call only the digest of its plan."""
    store, published = world_store(), rank_state.get().published
    if call.plan.digest not in published:
        store.set(_plan_key(call.plan.digest), json.dumps(call.plan.facts))
        published.add(call.plan.digest)
    store.set(_call_key(call.ranks, call.number, dist.get_rank()), call.plan.digest)


def _compare(call: _Call) -> None:
    group = rank_state.get().group(call.ranks)

    def answer_those_who_compile() -> None:
        if cause := _answer_compile(call, group):
            raise PeerError(cause)

    wait_for(call.keys, f"call {call.number} of compiled code", answer_those_who_compile)
    if difference := _plan_difference(call.keys):
        raise PeerError(difference)
    _delete_last(call.ranks, group)


def _plan_difference(keys: Mapping[int, str]) -> str:
    store = world_store()
    digests = {rank: store.get(key).decode() for rank, key in keys.items()}
    if len({*digests.values()}) == 1:
        return ""
    facts = {rank: json.loads(store.get(_plan_key(digest))) for rank, digest in digests.items()}
    store.set(f"{keys[dist.get_rank()]}/read", "")
    linger_until_read([f"{key}/read" for key in keys.values()])
    return first_difference(facts)


def _delete_last(ranks: Ranks, group: GroupState) -> None:
    """Deletes the keys of the last compared call, which nobody reads once all came to this one."""
    store = world_store()
    if group.last_compared is not None:
        store.delete_key(_call_key(ranks, group.last_compared, dist.get_rank()))
        if dist.get_rank() == ranks[0]:
            store.delete_key(_asked_key(ranks, group.last_compared))
    group.last_compared = group.calls


def answer(ranks: Ranks, group: GroupState) -> str:
    """Answers ranks that ask what this one runs and that do not take part in its call. Returns why
    the call can never end, once all answers are there; an empty string if that is not known.
    """
    number, plan = group.calls, group.plan
    if plan is None:
        return ""
    call = _Call(ranks, number, plan)
    return _answer_call(call, group) or _answer_compile(call, group)


def _answer_call(call: _Call, group: GroupState) -> str:
    store = world_store()
    is_compared = group.last_compared == call.number
    if is_compared or not store.check([_asked_key(call.ranks, call.number)]):
        return ""
    _publish(call)
    if not store.check(list(call.keys.values())):
        return ""
    group.last_compared = call.number
    return _plan_difference(call.keys)


def _answer_compile(call: _Call, group: GroupState) -> str:
    """Answers ranks that compile something new and have not begun the call that this rank is in."""
    store, rank, number = world_store(), dist.get_rank(), group.rounds
    if not store.check([asked_key(call.ranks, number, call.number - 1)]):
        return ""
    keys = {other: round_key(call.ranks, number, "captured", other) for other in call.ranks}
    store.set(keys[rank], record([*call.plan.captured, DOES_RUN]))
    if not store.check(list(keys.values())):
        return ""
    group.rounds = number + 1
    return difference_of(keys)


def _call_key(ranks: Ranks, call: int, rank: int) -> str:
    return f"cocodiff/call/{group_key(ranks)}/{call}/{rank}"


def _asked_key(ranks: Ranks, call: int) -> str:
    return f"cocodiff/call/{group_key(ranks)}/{call}/asked"


def _plan_key(digest: str) -> str:
    return f"cocodiff/plan/{digest}"
