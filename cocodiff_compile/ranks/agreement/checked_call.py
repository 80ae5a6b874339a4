"""Compiled code that communicates, called only if all ranks of its groups call the same."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from cocodiff_compile.errors import PeerError, UserError
from cocodiff_compile.ranks.agreement.call_rounds import begin_call
from cocodiff_compile.ranks.agreement.failures import tell
from cocodiff_compile.ranks.agreement.heartbeat import BEAT_S, Listener
from cocodiff_compile.ranks.agreement.run_plans import SizedPlans
from cocodiff_compile.ranks.agreement.standing import Ranks, RunPlan, Standing, standing
from cocodiff_compile.ranks.agreement.waiting import stay_until_closed, store_is_gone
from cocodiff_compile.ranks.agreement.watch import close, find_cause
from cocodiff_compile.ranks.agreement.world import ranks_are_real, world_store

CAUSE_S = 3 * BEAT_S
"""How long a rank whose collective failed looks for the cause: three beats of the others."""

_POLL_S = 0.2


@dataclass(eq=False)
class CheckedCall:
    """Called like the compiled graph it stands for."""

    run: Callable[[list[Any]], Any]
    plans: SizedPlans
    _boxed_call: bool = True
    _world: Callable[[], Any] = field(default=lambda: None, repr=False)
    _own: Standing | None = field(default=None, repr=False)

    def __call__(self, args: list[Any]) -> Any:
        own = self._standing()
        if own is None:
            return self.run(args)
        plans = self.plans.of_call(args)
        groups = [own.towards(ranks) for ranks in plans]
        for group in groups:
            if group.closed:
                raise PeerError(f"{group.closed}; the group is closed since: start all ranks anew")
        try:
            begin_call(plans, own)
            now = time.monotonic()
            for group in groups:
                group.running_since = now
            return self.run(args)
        except BaseException as error:
            for group in groups:
                group.running_since = group.plan = None
            _raise_cause(error, plans, own)
            raise
        finally:
            for group in groups:
                group.running_since = None

    def _standing(self) -> Standing | None:
        """Asked for once per world; None if it has no other ranks."""
        world = dist.group.WORLD
        if world is None:
            return None
        if self._world() is not world:
            self._world = weakref.ref(world)
            self._own = standing.get() if ranks_are_real() else None
        return self._own


def _raise_cause(error: BaseException, plans: Mapping[Ranks, RunPlan], own: Standing) -> None:
    """Raises what another rank did, if that is why this one failed; else tells the others."""
    if isinstance(error, PeerError):
        return  # the others know
    is_broken = isinstance(error, RuntimeError) and not isinstance(error, UserError)
    cause = ""
    try:
        cause = next(filter(None, (own.towards(ranks).closed for ranks in plans)), "")
        if not cause and is_broken and (cause := _look_for_cause(plans)):
            for ranks in plans:
                close(ranks, cause)
        if cause:
            for ranks in plans:
                stay_until_closed(ranks)
    except dist.DistError as lost:
        cause = cause or store_is_gone(lost)
    if cause:
        raise PeerError(f"{cause} ({_brief(error)})") from error
    tell(error, "failed while it ran compiled code", [*plans])


def _brief(error: BaseException) -> str:
    """Without where in the source of gloo it happened, and what it advises."""
    text = re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0]
    return f"{type(error).__name__}: {text}"


def _look_for_cause(plans: Mapping[Ranks, RunPlan]) -> str:
    """What other ranks say, or the silence of one."""
    listener = Listener(world_store())
    end = time.monotonic() + CAUSE_S
    others = sorted({rank for ranks in plans for rank in ranks} - {dist.get_rank()})
    while time.monotonic() < end:
        for ranks in plans:
            if cause := find_cause(ranks, standing.get().towards(ranks).calls):
                return cause
        time.sleep(_POLL_S)
        # When the last look comes, a rank that lives has beaten at least twice.
        silent = listener.silent(others, 0.8 * CAUSE_S)
        if silent:
            return f"ranks {silent} were killed or hang: look at their output"
    return ""
