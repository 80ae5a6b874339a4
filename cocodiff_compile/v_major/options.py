# SPDX-License-Identifier: Apache-2.0
"""Checks the option `v_major` of the compiler, `options={"v_major": {...}}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from cocodiff_compile.errors import UserError, refuse_unknown
from cocodiff_compile.given_values import is_one_of, number, shown, whole_number
from cocodiff_compile.v_major.delta_code import BITS, FULL
from cocodiff_compile.v_major.payload import ROLES, Payload
from cocodiff_compile.v_major.policy import Adaptive, Fixed, Paper, Policy

MAX_COUNT = 1_000_000
"""The largest number of steps or calls that is accepted, far beyond any run."""
MAX_BUCKETS = 1_000
MAX_BUDGET_MIB = 1e12


@dataclass(frozen=True)
class VMajorOptions:
    """Holds the checked options. The defaults are the meaning of `v_major={}`."""

    policy: str = "adaptive"
    """"adaptive" chooses the bits by the target, "fixed" uses the same payload in every step,
    "paper" follows the schedule of the CoCoDiff paper.
    """
    target_psnr_db: float = 40.0
    """adaptive: the wanted PSNR between the picture and the exact one."""
    gain_db: float = Adaptive.gain_db
    """adaptive: how far the signal-to-loss ratio of the first step's exchanges may be below the
    target. It depends on the model.
    """
    rise_db: float = Adaptive.rise_db
    """adaptive: how much more the last step may lose than the first."""
    bits: Payload = Payload.uniform(4)  # noqa: RUF009  (frozen)
    """fixed: the bits per element of each role."""
    first_bits: int = FULL
    """fixed: the bits of keyframes, that is of the warm-up and of each refresh. They apply to the
    roles that other steps send in fewer bits.
    """
    skipped_share: float = 0.0
    """fixed: the share of a rank's tokens of which Q, K and V are not sent."""
    compare: Literal["sent", "seen"] = "sent"
    """The value with which a token's V is compared where tokens are skipped: the one last "sent",
    or the one last "seen" whether it was sent or not.
    """
    reuse_output: bool = False
    """Whether O of skipped tokens is taken from a cache, so that attention runs over the queries of
    the other tokens only and O's exchange carries only theirs.
    """
    select_per_stream: bool = False
    """Whether tokens are selected per stream (text, image) instead of from all together."""
    compute_unsent: bool = False
    """Whether Q and K of skipped tokens are computed although they are not sent."""
    layers: tuple[float, ...] = ()
    """A factor from 0 to 1 of the skipped share for each attention of a graph; empty: 1 for all."""
    buckets: int = 4
    """paper: the number of stages in which the skipped share rises."""
    only_if_faster: bool = True
    """Whether an attention is sent uncompressed if coding it would take longer than it saves, as
    far as costs are known (see v_first). If False, all attentions are coded.
    """
    warm_up: int | None = None
    """The number of keyframes at the beginning; None: 1, or 5 for the policy "paper"."""
    refresh: int | None = None
    """The period of later keyframes, 0 for none; None: 0, or 10 for the policy "paper"."""
    memory_budget_mib: float | None = None
    """The size of all caches of a rank at most; None: unlimited."""
    guidance_passes: int = 2
    """The number of calls of the model per step, which share the memory budget."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> VMajorOptions:
        refuse_unknown(given, fields(cls), "option 'v_major': unknown key {}")
        checked = cls(**{key: _CHECKS[key](key, value) for key, value in given.items()})
        _refuse_unused(checked.policy, given)
        _refuse_without_tokens(checked, given)
        if "guidance_passes" in given and checked.memory_budget_mib is None:
            raise UserError(
                "option 'v_major': 'guidance_passes' divides a memory budget, and none is set; set "
                "'memory_budget_mib', or remove 'guidance_passes'"
            )
        if checked.compare == "seen" and not checked.compares_uncompressed:
            raise UserError(
                "option 'v_major': 'compare': 'seen' requires skipped tokens and uncompressed V; "
                "set 'skipped_share' and 'bits': {'v': 'full', ...}, or 'compare': 'sent'"
            )
        return checked

    @property
    def compares_uncompressed(self) -> bool:
        payloads = [payload for payload in self.make_policy().payloads if payload.skipped_share]
        return bool(payloads) and all(payload.bits_of()["v"] == FULL for payload in payloads)

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
            first = Payload.uniform(self.first_bits, is_intra_coded=self.first_bits != FULL)
            payload = replace(
                self.bits, skipped_share=self.skipped_share, reuses_output=self.reuse_output
            )
            return Fixed(payload, warm_up, refresh, first)
        return Adaptive(self.target_psnr_db, warm_up, refresh, self.gain_db, self.rise_db)


_ONLY_FOR = {
    "target_psnr_db": ("adaptive",),
    "gain_db": ("adaptive",),
    "rise_db": ("adaptive",),
    "bits": ("fixed",),
    "first_bits": ("fixed",),
    "skipped_share": ("fixed",),
    "compare": ("fixed", "paper"),
    "reuse_output": ("fixed", "paper"),
    "select_per_stream": ("fixed", "paper"),
    "compute_unsent": ("fixed", "paper"),
    "layers": ("fixed", "paper"),
    "buckets": ("paper",),
}


def _refuse_unused(policy: str, given: Mapping[str, Any]) -> None:
    for key, owners in _ONLY_FOR.items():
        if key in given and policy not in owners:
            named = " and ".join(map(repr, owners))
            raise UserError(
                f"option 'v_major': {key!r} applies only to policy {named}, and the policy is "
                f"{policy!r}; remove {key!r} or set 'policy': {owners[0]!r}"
            )


def _refuse_without_tokens(options: VMajorOptions, given: Mapping[str, Any]) -> None:
    if options.policy == "paper" or options.skipped_share:
        return
    for key in ("reuse_output", "select_per_stream", "compute_unsent", "layers"):
        if key in given:
            raise UserError(
                f"option 'v_major': {key!r} applies to skipped tokens, and no token is skipped; "
                f"set 'skipped_share', or remove {key!r}"
            )


def _refuse(key: str, value: object, allowed: str) -> UserError:
    return UserError(f"option 'v_major': {key!r} is {shown(value)}; allowed: {allowed}")


def _check_word(allowed: Sequence[str], key: str, value: object) -> str:
    if not is_one_of(value, allowed):
        raise _refuse(key, value, ", ".join(map(repr, allowed)))
    return value


def _check_number(least: int, most: int, key: str, value: object) -> float:
    checked = number(value)
    if checked is None or not least <= checked <= most:
        raise _refuse(key, value, f"a number from {least} to {most}")
    return checked


def _check_layers(key: str, value: object) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _refuse(key, value, "numbers from 0 to 1, one for each attention")
    return tuple(_check_number(0, 1, key, item) for item in value)


def _check_flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "True, False")
    return value


def _check_bits(key: str, value: object) -> Payload:
    if isinstance(value, Mapping):
        if set(value) != set(ROLES):
            raise _refuse(key, value, "one value, or a dict with the keys q, k, v, o")
        q, k, v, o = (_check_width(key, value[role]) for role in ROLES)
        return Payload((q, k, v, o))
    return Payload.uniform(_check_width(key, value))


def _check_width(key: str, value: object) -> int:
    if is_one_of(value, ("full",)):
        return FULL
    width = whole_number(value)
    if width is None or width not in BITS:
        raise _refuse(key, value, f"{', '.join(map(str, BITS))}, or 'full'")
    return width


def _check_count(least: int, most: int, key: str, value: object) -> int:
    count = whole_number(value)
    if count is None or not least <= count <= most:
        raise _refuse(key, value, f"a whole number from {least} to {most}")
    return count


def _check_optional_count(least: int, key: str, value: object) -> int | None:
    return None if value is None else _check_count(least, MAX_COUNT, key, value)


def _check_budget(key: str, value: object) -> float | None:
    if value is None:
        return None
    budget = number(value)
    if budget is None or not 0 < budget <= MAX_BUDGET_MIB:
        raise _refuse(key, value, f"None, or a number above 0 and up to {MAX_BUDGET_MIB:g}")
    return budget


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "policy": partial(_check_word, ("adaptive", "fixed", "paper")),
    "target_psnr_db": partial(_check_number, 10, 100),
    "gain_db": partial(_check_number, -50, 50),
    "rise_db": partial(_check_number, 0, 50),
    "bits": _check_bits,
    "first_bits": _check_width,
    "skipped_share": partial(_check_number, 0, 1),
    "reuse_output": _check_flag,
    "select_per_stream": _check_flag,
    "compute_unsent": _check_flag,
    "layers": _check_layers,
    "compare": partial(_check_word, ("sent", "seen")),
    "buckets": partial(_check_count, 1, MAX_BUCKETS),
    "only_if_faster": _check_flag,
    "warm_up": partial(_check_optional_count, 1),
    "refresh": partial(_check_optional_count, 0),
    "memory_budget_mib": _check_budget,
    "guidance_passes": partial(_check_count, 1, MAX_COUNT),
}
