"""`options={"v_major": {...}}`, checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from cocodiff_compile.errors import UserError
from cocodiff_compile.graph.delta_code import BITS, FULL
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Paper, Policy
from cocodiff_compile.v_major.travel import ROLES, Travel


@dataclass(frozen=True)
class VMajorOptions:
    """Defaults are what `v_major={}` means."""

    policy: str = "adaptive"
    """"adaptive": bits follow the target. "fixed": the same in every step. "paper": as CoCoDiff."""
    target_psnr_db: float = 40.0
    """adaptive: how close to the exact picture."""
    bits: Travel = Travel.all_in(4)  # noqa: RUF009  (frozen)
    """fixed: of each role."""
    omitted: float = 0.0
    """fixed: the share of a rank's tokens of which Q, K and V are not sent."""
    compare: Literal["sent", "seen"] = "sent"
    """With what a token's V is compared where some are not sent: with what was last "sent", or with
    what was last "seen", sent or not."""
    buckets: int = 4
    """paper: in how many stages the share that is not sent rises."""
    warm_up: int | None = None
    """Steps in full at the beginning; None: 1, paper: 5."""
    refresh: int | None = None
    """Every so many steps one in full, 0 for never; None: 0, paper: 10."""
    memory_budget_mib: float | None = None
    """What a rank may remember at most; None: as much as it takes."""
    guidance_passes: int = 2
    """Calls of the model per step, which share the budget."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> VMajorOptions:
        allowed = [field.name for field in fields(cls)]
        for key in given:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise UserError(
                    f"option 'v_major': unknown key {key!r}{hint}; allowed: {', '.join(allowed)}"
                )
        checked = cls(**{key: _CHECKS[key](value) for key, value in given.items()})
        _refuse_unused(checked.policy, given)
        if checked.compare == "seen" and not checked.compares_in_full:
            raise UserError(
                "option 'v_major': 'compare': 'seen' needs tokens left out, and V in full: "
                "what is coded is compared with what was last sent"
            )
        return checked

    @property
    def compares_in_full(self) -> bool:
        travels = [travel for travel in self.make_policy().travels if travel.omitted]
        return bool(travels) and all(travel.bits_of()["v"] == FULL for travel in travels)

    @property
    def budget_bytes(self) -> float | None:
        return None if self.memory_budget_mib is None else self.memory_budget_mib * 2**20

    @property
    def omits_tokens(self) -> bool:
        return any(travel.omitted for travel in self.make_policy().travels)

    def make_policy(self) -> Policy:
        defaults = (5, 10) if self.policy == "paper" else (1, 0)
        warm_up = defaults[0] if self.warm_up is None else self.warm_up
        refresh = defaults[1] if self.refresh is None else self.refresh
        if self.policy == "paper":
            return Paper(warm_up, refresh, self.buckets)
        if self.policy == "fixed":
            return Fixed(replace(self.bits, omitted=self.omitted), warm_up, refresh)
        return Adaptive(self.target_psnr_db, warm_up, refresh)


_ONLY_FOR = {
    "target_psnr_db": ("adaptive",),
    "bits": ("fixed",),
    "omitted": ("fixed",),
    "compare": ("fixed", "paper"),
    "buckets": ("paper",),
}


def _refuse_unused(policy: str, given: Mapping[str, Any]) -> None:
    for key, owners in _ONLY_FOR.items():
        if key in given and policy not in owners:
            named = " and ".join(map(repr, owners))
            raise UserError(
                f"option 'v_major': {key!r} belongs to policy {named}, the policy is {policy!r}; "
                f"leave it out or set 'policy': {owners[0]!r}"
            )


def _refuse(key: str, value: object, allowed: str) -> UserError:
    return UserError(f"option 'v_major': {key!r} is {value!r}; allowed: {allowed}")


def _check_policy(value: object) -> str:
    if not isinstance(value, str) or value not in ("adaptive", "fixed", "paper"):
        raise _refuse("policy", value, "'adaptive', 'fixed', 'paper'")
    return value


def _check_compare(value: object) -> str:
    if not isinstance(value, str) or value not in ("sent", "seen"):
        raise _refuse("compare", value, "'sent', 'seen'")
    return value


def _check_omitted(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise _refuse("omitted", value, "a number from 0 to 1")
    return float(value)


def _check_psnr(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 10 <= value <= 100:
        raise _refuse("target_psnr_db", value, "a number from 10 to 100")
    return float(value)


def _check_bits(value: object) -> Travel:
    if isinstance(value, Mapping):
        if set(value) != set(ROLES):
            raise _refuse("bits", value, "one value, or a dict with the keys q, k, v, o")
        q, k, v, o = (_check_width(value[role]) for role in ROLES)
        return Travel((q, k, v, o))
    return Travel.all_in(_check_width(value))


def _check_width(value: object) -> int:
    if value == "full":
        return FULL
    if isinstance(value, bool) or not isinstance(value, int) or value not in BITS:
        raise _refuse("bits", value, f"{', '.join(map(str, BITS))}, or 'full'")
    return value


def _check_count(key: str, least: int, may_be_none: bool) -> Callable[[object], int | None]:
    def check(value: object) -> int | None:
        if value is None and may_be_none:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _refuse(key, value, f"a whole number from {least}")
        return value

    return check


def _check_budget(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _refuse("memory_budget_mib", value, "None, or a number above 0")
    return float(value)


_CHECKS: dict[str, Callable[[object], Any]] = {
    "policy": _check_policy,
    "target_psnr_db": _check_psnr,
    "bits": _check_bits,
    "omitted": _check_omitted,
    "compare": _check_compare,
    "buckets": _check_count("buckets", 1, may_be_none=False),
    "warm_up": _check_count("warm_up", 1, may_be_none=True),
    "refresh": _check_count("refresh", 0, may_be_none=True),
    "memory_budget_mib": _check_budget,
    "guidance_passes": _check_count("guidance_passes", 1, may_be_none=False),
}
