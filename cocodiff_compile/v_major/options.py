"""`options={"v_major": {...}}`, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from cocodiff_compile.errors import UserError, refuse_unknown
from cocodiff_compile.given_values import is_one_of, number, shown, whole_number
from cocodiff_compile.v_major.delta_code import BITS, FULL
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Paper, Policy
from cocodiff_compile.v_major.travel import ROLES, Travel

MAX_COUNT = 1_000_000
"""Of steps and calls: far beyond any run."""
MAX_BUCKETS = 1_000
MAX_BUDGET_MIB = 1e12


@dataclass(frozen=True)
class VMajorOptions:
    """Defaults are what `v_major={}` means."""

    policy: str = "adaptive"
    """"adaptive": bits follow the target. "fixed": the same in every step. "paper": as CoCoDiff."""
    target_psnr_db: float = 40.0
    """adaptive: how close to the exact picture."""
    gain_db: float = Adaptive.gain_db
    """adaptive: by how much less than the target what is carried may exceed what is lost, in the
    first step; a model's own."""
    rise_db: float = Adaptive.rise_db
    """adaptive: how much more the last step may lose than the first."""
    bits: Travel = Travel.all_in(4)  # noqa: RUF009  (frozen)
    """fixed: of each role."""
    first_bits: int = FULL
    """fixed: of steps that lean on no earlier one, the warm-up and each refresh; of the roles that
    carry less in other steps."""
    omitted: float = 0.0
    """fixed: the share of a rank's tokens of which Q, K and V are not sent."""
    compare: Literal["sent", "seen"] = "sent"
    """With what a token's V is compared where some are not sent: with what was last "sent", or with
    what was last "seen", sent or not."""
    reuse_output: bool = False
    """Of tokens that are not sent O is taken from memory: attention over their queries, and the way
    out, are of the others only."""
    streams: Literal["together", "apart"] = "together"
    """Whether the tokens that are sent are chosen from all of a rank's, or from those of each
    projection, text and image say, on their own."""
    unsent: Literal["skipped", "computed"] = "skipped"
    """Whether Q and K of tokens that are not sent are computed all the same."""
    layers: tuple[float, ...] = ()
    """How much of the share that is left out each attention of a graph leaves out; none: all."""
    buckets: int = 4
    """paper: in how many stages the share that is not sent rises."""
    when: Literal["pays", "always"] = "pays"
    """"pays": an attention is left exact if coding would take longer than it saves, as far as costs
    are known (v_first). "always": it is not asked."""
    warm_up: int | None = None
    """Steps at the beginning that lean on no earlier one; None: 1, paper: 5."""
    refresh: int | None = None
    """Every so many steps one that leans on no earlier one, 0 for never; None: 0, paper: 10."""
    memory_budget_mib: float | None = None
    """What a rank may remember at most; None: as much as it takes."""
    guidance_passes: int = 2
    """Calls of the model per step, which share the budget."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> VMajorOptions:
        refuse_unknown(given, fields(cls), "option 'v_major': unknown key {}")
        checked = cls(**{key: _CHECKS[key](value) for key, value in given.items()})
        _refuse_unused(checked.policy, given)
        _refuse_without_tokens(checked, given)
        if "guidance_passes" in given and checked.memory_budget_mib is None:
            raise UserError(
                "option 'v_major': 'guidance_passes' share a budget, and there is none; set "
                "'memory_budget_mib', or leave it out"
            )
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

    def make_policy(self) -> Policy:
        defaults = (5, 10) if self.policy == "paper" else (1, 0)
        warm_up = defaults[0] if self.warm_up is None else self.warm_up
        refresh = defaults[1] if self.refresh is None else self.refresh
        if self.policy == "paper":
            return Paper(warm_up, refresh, self.buckets, self.reuse_output)
        if self.policy == "fixed":
            first = Travel.all_in(self.first_bits, is_anew=self.first_bits != FULL)
            travel = replace(self.bits, omitted=self.omitted, reuses_output=self.reuse_output)
            return Fixed(travel, warm_up, refresh, first)
        return Adaptive(self.target_psnr_db, warm_up, refresh, self.gain_db, self.rise_db)


_ONLY_FOR = {
    "target_psnr_db": ("adaptive",),
    "gain_db": ("adaptive",),
    "rise_db": ("adaptive",),
    "bits": ("fixed",),
    "first_bits": ("fixed",),
    "omitted": ("fixed",),
    "compare": ("fixed", "paper"),
    "reuse_output": ("fixed", "paper"),
    "streams": ("fixed", "paper"),
    "unsent": ("fixed", "paper"),
    "layers": ("fixed", "paper"),
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


def _refuse_without_tokens(options: VMajorOptions, given: Mapping[str, Any]) -> None:
    if options.policy == "paper" or options.omitted:
        return
    for key in ("reuse_output", "streams", "unsent", "layers"):
        if key in given:
            raise UserError(
                f"option 'v_major': {key!r} is about tokens that are not sent, and all are; set "
                "'omitted', or leave it out"
            )


def _refuse(key: str, value: object, allowed: str) -> UserError:
    return UserError(f"option 'v_major': {key!r} is {shown(value)}; allowed: {allowed}")


def _check_word(key: str, *allowed: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not is_one_of(value, allowed):
            raise _refuse(key, value, ", ".join(map(repr, allowed)))
        return value

    return check


def _check_number(key: str, least: int, most: int) -> Callable[[object], float]:
    def check(value: object) -> float:
        found = number(value)
        if found is None or not least <= found <= most:
            raise _refuse(key, value, f"a number from {least} to {most}")
        return found

    return check


def _check_layers(value: object) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _refuse("layers", value, "numbers from 0 to 1, one for each attention")
    return tuple(map(_check_number("layers", 0, 1), value))


def _check_flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "True, False")
    return value


def _check_bits(value: object) -> Travel:
    if isinstance(value, Mapping):
        if set(value) != set(ROLES):
            raise _refuse("bits", value, "one value, or a dict with the keys q, k, v, o")
        q, k, v, o = (_check_width("bits", value[role]) for role in ROLES)
        return Travel((q, k, v, o))
    return Travel.all_in(_check_width("bits", value))


def _check_width(key: str, value: object) -> int:
    if is_one_of(value, ("full",)):
        return FULL
    width = whole_number(value)
    if width is None or width not in BITS:
        raise _refuse(key, value, f"{', '.join(map(str, BITS))}, or 'full'")
    return width


def _check_count(
    key: str, least: int, may_be_none: bool, most: int = MAX_COUNT
) -> Callable[[object], int | None]:
    def check(value: object) -> int | None:
        if value is None and may_be_none:
            return None
        count = whole_number(value)
        if count is None or not least <= count <= most:
            raise _refuse(key, value, f"a whole number from {least} to {most}")
        return count

    return check


def _check_budget(value: object) -> float | None:
    if value is None:
        return None
    budget = number(value)
    if budget is None or not 0 < budget <= MAX_BUDGET_MIB:
        allowed = f"None, or a number above 0 and up to {MAX_BUDGET_MIB:g}"
        raise _refuse("memory_budget_mib", value, allowed)
    return budget


_CHECKS: dict[str, Callable[[object], Any]] = {
    "policy": _check_word("policy", "adaptive", "fixed", "paper"),
    "target_psnr_db": _check_number("target_psnr_db", 10, 100),
    "gain_db": _check_number("gain_db", -50, 50),
    "rise_db": _check_number("rise_db", 0, 50),
    "bits": _check_bits,
    "first_bits": functools.partial(_check_width, "first_bits"),
    "omitted": _check_number("omitted", 0, 1),
    "reuse_output": functools.partial(_check_flag, "reuse_output"),
    "streams": _check_word("streams", "together", "apart"),
    "unsent": _check_word("unsent", "skipped", "computed"),
    "layers": _check_layers,
    "compare": _check_word("compare", "sent", "seen"),
    "buckets": _check_count("buckets", 1, may_be_none=False, most=MAX_BUCKETS),
    "when": _check_word("when", "pays", "always"),
    "warm_up": _check_count("warm_up", 1, may_be_none=True),
    "refresh": _check_count("refresh", 0, may_be_none=True),
    "memory_budget_mib": _check_budget,
    "guidance_passes": _check_count("guidance_passes", 1, may_be_none=False),
}
