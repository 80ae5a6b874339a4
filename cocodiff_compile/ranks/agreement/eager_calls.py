# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a group compare a collective that they run outside of compiled code.

It counts as a call over the group, like a call of compiled code (`call_rounds`). What it is, in
words, is compared when a rank runs it for the first time: a rank that runs something else in this
call answers, and all raise. Later ones cost no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cocodiff_compile.ranks.agreement.call_rounds import begin_call
from cocodiff_compile.ranks.agreement.checked_call import checked
from cocodiff_compile.ranks.agreement.rank_state import Ranks, RankState, RunPlan, rank_state
from cocodiff_compile.ranks.agreement.world import ranks_are_real

_OUTSIDE = "what runs outside of compiled code"


@contextmanager
def eager_call(ranks: Ranks, what: str) -> Iterator[None]:
    """Wraps a collective of these ranks. Raises PeerError on every rank if not all run it."""
    if not ranks_are_real():
        yield
        return
    own = rank_state.get()
    group = own.group(ranks)
    last = group.plan
    facts = last or RunPlan((), ())
    plan = RunPlan(((_OUTSIDE, what), *facts.captured), facts.planned)
    is_compared = what in group.compared_outside
    with checked({ranks: plan}, own, _count if is_compared else begin_call):
        group.compared_outside.add(what)
        yield
    group.plan = last


def _count(plans: Mapping[Ranks, RunPlan], own: RankState) -> None:
    for ranks, plan in plans.items():
        group = own.group(ranks)
        group.calls, group.plan = group.calls + 1, plan
