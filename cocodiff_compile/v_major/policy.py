# SPDX-License-Identifier: Apache-2.0
"""Chooses the payload of each denoising step, from the step and numbers that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from cocodiff_compile.v_major.delta_code import BITS, distortion
from cocodiff_compile.v_major.payload import UNCOMPRESSED, Payload


@dataclass(frozen=True)
class StepFacts:
    """Holds what a policy knows before a step.

    `drift` is the share of its energy that a head of a token lost in the exchanges of the last
    step, averaged over all heads and ranks; None if nothing was lost or measured. `worst` is the
    largest such share.
    """

    step: int
    num_steps: int | None
    drift: float | None = None
    last: Payload = UNCOMPRESSED
    worst: float = 0.0


class Policy(Protocol):
    @property
    def first(self) -> Payload:
        """The payload of a step that cannot use caches of an earlier one; it is a keyframe."""
        ...

    @property
    def usual(self) -> Payload:
        """The payload that most steps are expected to have; costs are estimated for it."""
        ...

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """Returns all payloads that the policy may choose."""
        ...

    @property
    def measures_drift(self) -> bool: ...

    def choose(self, facts: StepFacts) -> Payload: ...


@dataclass(frozen=True)
class Fixed:
    """Chooses the same payload in every step, except for `warm_up` steps at the beginning and every
    `refresh`-th step after them (0: none), which have the payload `first`.
    """

    payload: Payload
    warm_up: int = 1
    refresh: int = 0
    first: Payload = UNCOMPRESSED
    measures_drift: ClassVar[bool] = False

    @property
    def usual(self) -> Payload:
        return self.payload

    @property
    def payloads(self) -> tuple[Payload, ...]:
        return (self.first, self.payload)

    def choose(self, facts: StepFacts) -> Payload:
        return self.first if is_refreshed(facts, self.warm_up, self.refresh) else self.payload


@dataclass(frozen=True)
class Adaptive:
    """Chooses the fewest bits that keep the picture within `target_psnr_db` of the exact one. If no
    number of bits does, or if a first step lost too much, it sends a step uncompressed and the next
    one in the most bits.

    The drift of the last step tells how much a step changes, from which the loss of each number of
    bits follows. The energy of what is sent over the energy of what is lost may be `gain_db` below
    the target in the first step. Later losses change a picture less: the allowance rises by
    `rise_db` until the last step. Both were fitted to the small trained model. The head of a token
    that loses most may lose `worst_db` more than the mean; on that model, with 2 and 4 bits, it
    mostly lost 17 dB more and once 26.
    """

    target_psnr_db: float
    warm_up: int = 1
    refresh: int = 0
    gain_db: float = 3.0
    rise_db: float = 10.0
    worst_db: float = 25.0
    measures_drift: ClassVar[bool] = True

    @property
    def first(self) -> Payload:
        """The payload of a keyframe: intra-coded, unless even the most bits would lose too much."""
        if distortion(BITS[-1]) > self._allowed(0):
            return UNCOMPRESSED
        return Payload.uniform(BITS[-1], is_intra_coded=True)

    @property
    def usual(self) -> Payload:
        """The payload of most steps, and of steps before any drift is measured: 4 bits, or the most
        bits if a keyframe needs to be uncompressed.
        """
        return Payload.uniform(4 if self.first.is_intra_coded else BITS[-1])

    @property
    def payloads(self) -> tuple[Payload, ...]:
        return tuple(dict.fromkeys((self.first, UNCOMPRESSED, *map(Payload.uniform, BITS))))

    def choose(self, facts: StepFacts) -> Payload:
        if is_refreshed(facts, self.warm_up, self.refresh):
            return self.first
        if facts.last.is_uncompressed:
            return Payload.uniform(BITS[-1])
        if facts.drift is None:
            return self.usual
        allowed = self._allowed(facts.step / facts.num_steps if facts.num_steps else 0)
        if facts.last.is_intra_coded:
            is_allowed = self._is_allowed(facts.drift, facts.worst, allowed)
            return self.usual if is_allowed else UNCOMPRESSED
        coded = distortion(facts.last.bits[0])
        change, worst = facts.drift / coded, facts.worst / coded
        enough = (
            bits
            for bits in BITS
            if self._is_allowed(change * distortion(bits), worst * distortion(bits), allowed)
        )
        return next(map(Payload.uniform, enough), UNCOMPRESSED)

    def _is_allowed(self, lost: float, worst: float, allowed: float) -> bool:
        """Returns whether the loss is allowed; an unknown one, which is NaN, is not."""
        return lost <= allowed and worst <= allowed * 10 ** (self.worst_db / 10)

    def _allowed(self, progress: float) -> float:
        """Returns the share of the energy sent that exchanges may lose. `progress` goes from 0 to
        1, and stays 0 where the number of steps is unknown.
        """
        gain_db = self.gain_db + self.rise_db * progress
        return float(10 ** ((gain_db - self.target_psnr_db) / 10))


@dataclass(frozen=True)
class Paper:
    """Chooses payloads as the CoCoDiff paper does. After `warm_up` steps the share of skipped
    tokens rises from 0 to 1 until the last step, in `buckets` stages. Every `refresh`-th step, and
    O always, is sent uncompressed.
    """

    warm_up: int = 5
    refresh: int = 10
    buckets: int = 4
    reuses_output: bool = False
    """Whether O of skipped tokens is not sent either."""
    first: ClassVar[Payload] = UNCOMPRESSED
    measures_drift: ClassVar[bool] = False

    @property
    def usual(self) -> Payload:
        return self._skipping(0.5)

    @property
    def payloads(self) -> tuple[Payload, ...]:
        shares = (stage / self.buckets for stage in range(1, self.buckets + 1))
        return (UNCOMPRESSED, *map(self._skipping, shares))

    def choose(self, facts: StepFacts) -> Payload:
        if facts.num_steps is None or is_refreshed(facts, self.warm_up, self.refresh):
            return UNCOMPRESSED
        rising = max(1, facts.num_steps - 1 - self.warm_up)
        stage = round((facts.step - self.warm_up) / rising * self.buckets)
        return self._skipping(stage / self.buckets)

    def _skipping(self, share: float) -> Payload:
        return replace(
            UNCOMPRESSED, skipped_share=share, reuses_output=self.reuses_output and share > 0
        )


def is_refreshed(facts: StepFacts, warm_up: int, refresh: int) -> bool:
    """Returns whether a step is a keyframe whatever its data: one of the first `warm_up`, every
    `refresh`-th after them, and any beyond the announced number of steps.
    """
    if facts.step < warm_up:
        return True
    if facts.num_steps is not None and facts.step >= facts.num_steps:
        return True
    return bool(refresh) and (facts.step - warm_up + 1) % refresh == 0
