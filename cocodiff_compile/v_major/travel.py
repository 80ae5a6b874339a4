"""What the exchanges of a denoising step carry. A few kinds, each compiled once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cocodiff_compile.ir.records import Role
from cocodiff_compile.v_major.delta_code import FULL, code_bits

ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Travel:
    """`bits` per element of Q's, K's, V's and O's exchange; FULL for one that travels as it is.
    `omitted`: the share of a rank's tokens of which Q, K and V are not sent at all, those whose V
    changed least. `is_anew`: what is coded is coded by itself, not as a difference; of all tokens.
    `reuses_output`: of tokens that are not sent O is not computed nor sent either.
    """

    bits: tuple[int, int, int, int]
    omitted: float = 0.0
    is_anew: bool = False
    reuses_output: bool = False

    @classmethod
    def all_in(cls, bits: int, is_anew: bool = False) -> Travel:
        return cls((bits,) * 4, is_anew=is_anew)

    def bits_of(self) -> dict[Role, int]:
        return dict(zip(ROLES, self.bits, strict=True))

    @property
    def is_full(self) -> bool:
        return all(bits == FULL for bits in self.bits) and not self.omitted

    @property
    def stands_alone(self) -> bool:
        """Whether it needs nothing of earlier steps: how a picture begins."""
        return self.is_anew or self.is_full

    def share_of(self, role: Role, element_bits: int, group: int) -> float:
        """Bytes that are sent of a role, over those in full; `group` elements share a scale."""
        bits = self.bits_of()[role]
        coded = 1.0 if bits == FULL else code_bits(bits, group) / (group * element_bits)
        is_whole = role == "o" and not self.reuses_output
        return coded * (1.0 if is_whole else 1.0 - self.omitted)

    def sent_share(self, element_bits: int, group: int) -> float:
        """The same of all roles."""
        return sum(self.share_of(role, element_bits, group) for role in ROLES) / len(ROLES)

    def __str__(self) -> str:
        if len(set(self.bits)) == 1:
            bits = "in full" if self.bits[0] == FULL else f"{self.bits[0]} bits"
        else:
            named = (
                f"{role.upper()} {'in full' if width == FULL else f'{width} bits'}"
                for role, width in self.bits_of().items()
            )
            bits = ", ".join(named)
        output = ", O too" if self.reuses_output else ""
        omitted = f"{self.omitted:.0%} of tokens left out{output}" if self.omitted else ""
        return ", ".join(filter(None, (bits, omitted, "anew" if self.is_anew else "")))


IN_FULL = Travel.all_in(FULL)


@dataclass(frozen=True)
class Remembered:
    """Of which roles the sender remembers what it sent, and the receiver what it received."""

    sent: frozenset[Role]
    held: frozenset[Role]
    coded: frozenset[Role] = frozenset()
    """Those that are remembered also where no tokens are left out."""

    @classmethod
    def for_all(cls, travels: Iterable[Travel]) -> Remembered:
        """What steps of all these kinds need of each other."""
        sent: set[Role] = set()
        held: set[Role] = set()
        coded: set[Role] = set()
        for travel in travels:
            if travel.stands_alone:
                continue
            coded |= {role for role, bits in travel.bits_of().items() if bits != FULL}
            if travel.omitted:
                sent.add("v")
                # Queries of tokens whose output is reused are not needed.
                held |= {"k", "v", "o" if travel.reuses_output else "q"}
        return cls(frozenset(sent | coded), frozenset(held | coded), frozenset(coded))

    @property
    def of_all_tokens(self) -> Remembered:
        """What is left of it for an attention that leaves out no tokens."""
        return Remembered(self.coded, self.coded, self.coded)

    def sides_of(self, roles: Iterable[Role]) -> tuple[bool, bool]:
        """Whether an exchange that serves these roles is remembered: what was sent, and held."""
        asked = set(roles)
        return not self.sent.isdisjoint(asked), not self.held.isdisjoint(asked)
