"""Which step carries what: pure functions of the step and of numbers that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from cocodiff_compile.v_major.delta_code import BITS, distortion
from cocodiff_compile.v_major.travel import IN_FULL, Travel


@dataclass(frozen=True)
class StepFacts:
    """What is known before a step. `drift`: the share of its energy that a head of a token lost in
    the last step's exchanges, in the mean over all of all ranks; None if nothing was lost or
    measured. `worst`: what the one lost that lost most.
    """

    step: int
    num_steps: int | None
    drift: float | None = None
    last: Travel = IN_FULL
    worst: float = 0.0


class Policy(Protocol):
    @property
    def first(self) -> Travel:
        """What a step carries that cannot lean on an earlier one; it stands alone."""
        ...

    @property
    def usual(self) -> Travel:
        """What most steps are expected to carry; costs are estimated for it."""
        ...

    @property
    def travels(self) -> tuple[Travel, ...]:
        """All that it may choose."""
        ...

    @property
    def measures_drift(self) -> bool: ...

    def choose(self, facts: StepFacts) -> Travel: ...


@dataclass(frozen=True)
class Fixed:
    """The same in every step, but for `warm_up` steps at the beginning and every `refresh`-th after
    them (0: none), which carry `first`.
    """

    travel: Travel
    warm_up: int = 1
    refresh: int = 0
    first: Travel = IN_FULL

    @property
    def usual(self) -> Travel:
        return self.travel

    @property
    def travels(self) -> tuple[Travel, ...]:
        return (self.first, self.travel)

    @property
    def measures_drift(self) -> bool:
        return False

    def choose(self, facts: StepFacts) -> Travel:
        return self.first if is_refreshed(facts, self.warm_up, self.refresh) else self.travel


@dataclass(frozen=True)
class Adaptive:
    """As few bits as keep the picture within `target_psnr_db` of the exact one; where no number of
    bits does, or a first step lost too much, a step in full, and after that one in most bits.

    The drift of the last step tells how much a step changes; from that follows what each number of
    bits would lose. The energy of what is carried, over that of what is lost, may be `gain_db`
    below the target in the first step. What later steps lose moves a picture less: the allowance
    rises until the last one, by `rise_db`. Both were fitted to the small trained model. The head of
    a token that loses most may lose `worst_db` more than all do in the mean; on that model, with 2
    and 4 bits, it mostly lost 17 dB more and once 26.
    """

    target_psnr_db: float
    warm_up: int = 1
    refresh: int = 0
    gain_db: float = 3.0
    rise_db: float = 10.0
    worst_db: float = 25.0

    @property
    def first(self) -> Travel:
        """In full only if the most bits would lose too much."""
        most = BITS[-1]
        return (
            Travel.all_in(most, is_anew=True) if distortion(most) <= self._allowed(0) else IN_FULL
        )

    @property
    def usual(self) -> Travel:
        """Also while no change was seen yet: 4 bits, all of them if even a first step needs more
        than that.
        """
        return Travel.all_in(4 if self.first.is_anew else BITS[-1])

    @property
    def travels(self) -> tuple[Travel, ...]:
        return tuple(dict.fromkeys((self.first, IN_FULL, *map(Travel.all_in, BITS))))

    @property
    def measures_drift(self) -> bool:
        return True

    def choose(self, facts: StepFacts) -> Travel:
        if is_refreshed(facts, self.warm_up, self.refresh):
            return self.first
        if facts.last.is_full:
            return Travel.all_in(BITS[-1])
        if facts.drift is None:
            return self.usual
        allowed = self._allowed(facts.step / facts.num_steps if facts.num_steps else 0)
        if facts.last.is_anew:
            return self.usual if self._is_allowed(facts.drift, facts.worst, allowed) else IN_FULL
        coded = distortion(facts.last.bits[0])
        change, worst = facts.drift / coded, facts.worst / coded
        enough = (
            bits
            for bits in BITS
            if self._is_allowed(change * distortion(bits), worst * distortion(bits), allowed)
        )
        return next(map(Travel.all_in, enough), IN_FULL)

    def _is_allowed(self, lost: float, worst: float, allowed: float) -> bool:
        """Not if it is unknown how much is lost: NaN is not less than anything."""
        return lost <= allowed and worst <= allowed * 10 ** (self.worst_db / 10)

    def _allowed(self, progress: float) -> float:
        """What exchanges may lose, as a share of the energy of what they carry. `progress` goes
        from 0 to 1, and stays 0 where nobody said how many steps there are.
        """
        gain_db = self.gain_db + self.rise_db * progress
        return float(10 ** ((gain_db - self.target_psnr_db) / 10))


@dataclass(frozen=True)
class Paper:
    """CoCoDiff's own: after `warm_up` steps the share of tokens that are not sent rises from 0 to 1
    until the last step, in `buckets` stages. Every `refresh`-th step, and O always, travel in full.
    """

    warm_up: int = 5
    refresh: int = 10
    buckets: int = 4
    reuses_output: bool = False
    """O of tokens that are not sent is not sent either."""

    @property
    def first(self) -> Travel:
        return IN_FULL

    @property
    def usual(self) -> Travel:
        return self._leaving_out(0.5)

    @property
    def travels(self) -> tuple[Travel, ...]:
        shares = (stage / self.buckets for stage in range(1, self.buckets + 1))
        return (IN_FULL, *map(self._leaving_out, shares))

    @property
    def measures_drift(self) -> bool:
        return False

    def choose(self, facts: StepFacts) -> Travel:
        if facts.num_steps is None or is_refreshed(facts, self.warm_up, self.refresh):
            return IN_FULL
        rising = max(1, facts.num_steps - 1 - self.warm_up)
        stage = round((facts.step - self.warm_up) / rising * self.buckets)
        return self._leaving_out(stage / self.buckets)

    def _leaving_out(self, share: float) -> Travel:
        return replace(IN_FULL, omitted=share, reuses_output=self.reuses_output and share > 0)


def is_refreshed(facts: StepFacts, warm_up: int, refresh: int) -> bool:
    """Whether a step stands alone whatever its data: the first ones, every `refresh`-th after
    them, and those beyond the number that was announced.
    """
    if facts.step < warm_up:
        return True
    if facts.num_steps is not None and facts.step >= facts.num_steps:
        return True
    return bool(refresh) and (facts.step - warm_up + 1) % refresh == 0
