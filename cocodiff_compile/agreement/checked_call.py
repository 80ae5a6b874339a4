"""Compiled code that communicates, called only if all ranks of its groups call the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cocodiff_compile.agreement.call_rounds import begin_call
from cocodiff_compile.agreement.failures import failure_of, tell
from cocodiff_compile.agreement.heartbeat import BEAT_S, Listener
from cocodiff_compile.agreement.run_plans import SizedPlans
from cocodiff_compile.agreement.standing import Ranks, RunPlan, standing
from cocodiff_compile.agreement.waiting import closed_by_others, store_is_gone
from cocodiff_compile.agreement.world import ranks_are_real
from cocodiff_compile.compat import default_store
from cocodiff_compile.errors import PeerError

CAUSE_S = 3 * BEAT_S
"""How long a rank whose collective failed looks for the cause: three beats of the others."""

_POLL_S = 0.2


@dataclass(eq=False)
class CheckedCall:
    """Called like the compiled graph it stands for."""

    run: Callable[[list[Any]], Any]
    plans: SizedPlans
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> Any:
        if not ranks_are_real():
            return self.run(args)
        own = standing.get()
        if own.closed:
            raise PeerError(f"{own.closed}; its groups are closed since: start all ranks anew")
        plans = self.plans.of_call(args)
        groups = [own.towards(ranks) for ranks in plans]
        try:
            begin_call(plans)
            for group in groups:
                group.running_since = time.monotonic()
            return self.run(args)
        except BaseException as error:
            for group in groups:
                group.running_since = group.plan = None
            _raise_cause(error, plans)
            raise
        finally:
            for group in groups:
                group.running_since = None


def _raise_cause(error: BaseException, plans: Mapping[Ranks, RunPlan]) -> None:
    """Raises what another rank did, if that is why this one failed; else tells the others."""
    if isinstance(error, PeerError):
        return
    looks_s = CAUSE_S if isinstance(error, RuntimeError) else 0.0
    try:
        cause = standing.get().closed or _find_cause(plans, looks_s)
    except dist.DistError as lost:
        cause = store_is_gone(lost)
    if cause:
        raise PeerError(f"{cause} ({type(error).__name__}: {error})") from error
    tell(error, "failed while it ran compiled code", [*plans])


def _find_cause(plans: Mapping[Ranks, RunPlan], looks_s: float) -> str:
    """A failure that another rank told, or its silence."""
    listener = Listener(default_store())
    end = time.monotonic() + looks_s
    while True:
        for ranks in plans:
            calls = standing.get().towards(ranks).calls
            if cause := failure_of(ranks, calls) or closed_by_others(ranks):
                return cause
        others = sorted({rank for ranks in plans for rank in ranks} - {dist.get_rank()})
        # The last look comes when a rank that lives has beaten at least twice.
        silent = listener.silent(others, 0.8 * looks_s)
        if silent:
            return f"ranks {silent} ended, were killed or hang: look at their output"
        if time.monotonic() >= end:
            return ""
        time.sleep(_POLL_S)
