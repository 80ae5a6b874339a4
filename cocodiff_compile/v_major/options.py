"""`options={"v_major": {...}}`, checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cocodiff_compile.errors import UserError
from cocodiff_compile.graph.delta_code import BITS, FULL
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Policy
from cocodiff_compile.v_major.travel import ROLES, Travel


@dataclass(frozen=True)
class VMajorOptions:
    """Defaults are what `v_major={}` means."""

    policy: str = "adaptive"
    """"adaptive": bits follow the target. "fixed": the same bits in every step."""
    target_psnr_db: float = 40.0
    """adaptive: how close to the exact picture."""
    bits: Travel = Travel.all_in(4)  # noqa: RUF009  (frozen)
    """fixed: of each role."""
    warm_up: int = 1
    """Steps in full at the beginning."""
    refresh: int = 0
    """Every so many steps one in full; 0: never."""
    memory_budget_mib: float | None = None
    """What a rank may remember at most; None: as much as it takes."""

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
        if not checked.warm_up:
            raise _refuse("warm_up", 0, "a whole number from 1: the first step has nothing before")
        _refuse_unused(checked.policy, given)
        return checked

    @property
    def budget_bytes(self) -> float | None:
        return None if self.memory_budget_mib is None else self.memory_budget_mib * 2**20

    def make_policy(self) -> Policy:
        if self.policy == "fixed":
            return Fixed(self.bits, self.warm_up, self.refresh)
        return Adaptive(self.target_psnr_db, self.warm_up, self.refresh)


_ONLY_FOR = {"target_psnr_db": "adaptive", "bits": "fixed"}


def _refuse_unused(policy: str, given: Mapping[str, Any]) -> None:
    for key, owner in _ONLY_FOR.items():
        if key in given and policy != owner:
            raise UserError(
                f"option 'v_major': {key!r} belongs to policy {owner!r}, the policy is {policy!r}; "
                f"leave it out or set 'policy': {owner!r}"
            )


def _refuse(key: str, value: object, allowed: str) -> UserError:
    return UserError(f"option 'v_major': {key!r} is {value!r}; allowed: {allowed}")


def _check_policy(value: object) -> str:
    if not isinstance(value, str) or value not in ("adaptive", "fixed"):
        raise _refuse("policy", value, "'adaptive', 'fixed'")
    return value


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


def _check_count(key: str) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _refuse(key, value, "a whole number from 0")
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
    "warm_up": _check_count("warm_up"),
    "refresh": _check_count("refresh"),
    "memory_budget_mib": _check_budget,
}
