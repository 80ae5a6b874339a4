# SPDX-License-Identifier: Apache-2.0
"""Calls compiled code that communicates, only if all ranks of its groups call the same."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from cocodiff_compile.errors import PeerError, UserError
from cocodiff_compile.ranks.agreement.call_rounds import begin_call
from cocodiff_compile.ranks.agreement.failures import report_failure
from cocodiff_compile.ranks.agreement.heartbeat import BEAT_S, Listener
from cocodiff_compile.ranks.agreement.rank_state import Ranks, RankState, RunPlan, rank_state
from cocodiff_compile.ranks.agreement.run_plans import SizedPlans
from cocodiff_compile.ranks.agreement.waiting import linger_until_closed, store_is_gone
from cocodiff_compile.ranks.agreement.watch import close, find_cause
from cocodiff_compile.ranks.agreement.world import ranks_are_real, world_store

CAUSE_S = 3 * BEAT_S
"""How long a rank whose collective failed looks for the cause: three heartbeats of the others."""

_POLL_S = 0.2


@dataclass(eq=False)
class CheckedCall:
    """Checks and runs a call, with the signature of the compiled graph it replaces."""

    run: Callable[[list[Any]], Any]
    plans: SizedPlans
    _boxed_call: bool = True
    _world: Callable[[], Any] = field(default=lambda: None, repr=False)
    _own: RankState | None = field(default=None, repr=False)

    def __call__(self, args: list[Any]) -> Any:
        own = self._rank_state()
        if own is None:
            return self.run(args)
        plans = self.plans.of_call(args)
        with checked(plans, own, begin_call):
            return self.run(args)

    def _rank_state(self) -> RankState | None:
        """Returns the state of this rank, looked up once per world; None if it has no peers."""
        world = dist.group.WORLD
        if world is None:
            return None
        if self._world() is not world:
            self._world = weakref.ref(world)
            self._own = rank_state.get() if ranks_are_real() else None
        return self._own


@contextmanager
def checked(
    plans: Mapping[Ranks, RunPlan],
    own: RankState,
    begin: Callable[[Mapping[Ranks, RunPlan], RankState], None],
) -> Iterator[None]:
    """Wraps what runs collectives over these groups, after `begin` has counted and compared it. If
    another rank is the cause of an error in it, raises with what that rank did.
    """
    groups = [own.group(ranks) for ranks in plans]
    for group in groups:
        if group.closed:
            raise PeerError(f"{group.closed}; the group was closed: restart all ranks")
    try:
        begin(plans, own)
        now = time.monotonic()
        for group in groups:
            group.running_since = now
        yield
    except BaseException as error:
        for group in groups:
            group.running_since = group.plan = None
        _raise_cause(error, plans, own)
        raise
    finally:
        for group in groups:
            group.running_since = None


def _raise_cause(error: BaseException, plans: Mapping[Ranks, RunPlan], own: RankState) -> None:
    """Raises with what another rank did if that is the cause; else reports the error to others."""
    if isinstance(error, PeerError):
        return  # the other ranks know of it
    is_broken = isinstance(error, RuntimeError) and not isinstance(error, UserError)
    cause = ""
    try:
        cause = next(filter(None, (own.group(ranks).closed for ranks in plans)), "")
        if not cause and is_broken and (cause := _look_for_cause(plans)):
            for ranks in plans:
                close(ranks, cause)
        if cause:
            for ranks in plans:
                linger_until_closed(ranks)
    except dist.DistError as lost:
        cause = cause or store_is_gone(lost)
    if cause:
        raise PeerError(f"{cause} ({_brief(error)})") from error
    report_failure(error, "failed while it ran compiled code", [*plans])


def _brief(error: BaseException) -> str:
    """Returns the error without gloo's source location and advice."""
    text = re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0]
    return f"{type(error).__name__}: {text}"


def _look_for_cause(plans: Mapping[Ranks, RunPlan]) -> str:
    """Returns what other ranks report, or which of them are silent."""
    listener = Listener(world_store())
    end = time.monotonic() + CAUSE_S
    others = sorted({rank for ranks in plans for rank in ranks} - {dist.get_rank()})
    while time.monotonic() < end:
        for ranks in plans:
            if cause := find_cause(ranks, rank_state.get().group(ranks).calls):
                return cause
        time.sleep(_POLL_S)
        # By the last check, a rank that lives has beaten at least twice.
        silent = listener.silent(others, 0.8 * CAUSE_S)
        if silent:
            return f"ranks {silent} were killed or hang: see their output"
    return ""
