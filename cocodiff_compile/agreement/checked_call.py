"""Compiled code that communicates, called only if all ranks of its groups call the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cocodiff_compile.agreement.call_rounds import begin_call
from cocodiff_compile.agreement.failures import tell
from cocodiff_compile.agreement.heartbeat import BEAT_S, Listener
from cocodiff_compile.agreement.run_plans import SizedPlans
from cocodiff_compile.agreement.standing import Ranks, RunPlan, standing
from cocodiff_compile.agreement.waiting import store_is_gone
from cocodiff_compile.agreement.watch import close, find_cause
from cocodiff_compile.agreement.world import ranks_are_real, world_store
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
        return  # the others know
    is_broken = isinstance(error, RuntimeError)
    try:
        cause = standing.get().closed or (_look_for_cause(plans) if is_broken else "")
        if cause and not standing.get().closed:
            for ranks in plans:
                close(ranks, cause)
    except dist.DistError as lost:
        cause = store_is_gone(lost)
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
