"""What the exchanges of a denoising step carry. A few kinds, each compiled once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cocodiff_compile.graph.delta_code import FULL, code_bytes
from cocodiff_compile.graph.records import Role

ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Travel:
    """`bits` per element of Q's, K's, V's and O's exchange; FULL for one that travels as it is.
    `omitted`: the share of a rank's tokens of which Q, K and V are not sent at all, those whose V
    changed least.
    """

    bits: tuple[int, int, int, int]
    omitted: float = 0.0

    @classmethod
    def all_in(cls, bits: int) -> Travel:
        return cls((bits,) * 4)

    def bits_of(self) -> dict[Role, int]:
        return dict(zip(ROLES, self.bits, strict=True))

    @property
    def is_full(self) -> bool:
        return all(bits == FULL for bits in self.bits) and not self.omitted

    def sent_share(self, element_bits: int, group: int) -> float:
        """Bytes that are sent, over those of all in full."""
        shares = {
            role: 1.0 if bits == FULL else 8 * code_bytes(bits, group) / (group * element_bits)
            for role, bits in self.bits_of().items()
        }
        kept = 1.0 - self.omitted
        return sum(share * (1.0 if role == "o" else kept) for role, share in shares.items()) / 4

    def __str__(self) -> str:
        share = f"{self.omitted:.0%} of tokens left out" if self.omitted else ""
        if len(set(self.bits)) == 1:
            bits = "in full" if self.bits[0] == FULL else f"{self.bits[0]} bits"
        else:
            named = (
                f"{role.upper()} {'in full' if width == FULL else f'{width} bits'}"
                for role, width in self.bits_of().items()
            )
            bits = ", ".join(named)
        return f"{bits}, {share}" if share else bits


IN_FULL = Travel.all_in(FULL)


@dataclass(frozen=True)
class Remembered:
    """Of which roles the sender remembers what it sent, and the receiver what it received."""

    sent: frozenset[Role]
    held: frozenset[Role]

    @classmethod
    def for_all(cls, travels: Iterable[Travel]) -> Remembered:
        """What steps of all these kinds need of each other."""
        sent: set[Role] = set()
        held: set[Role] = set()
        for travel in travels:
            coded = {role for role, bits in travel.bits_of().items() if bits != FULL}
            sent |= coded
            held |= coded
            if travel.omitted:
                sent.add("v")
                held |= {"q", "k", "v"}
        return cls(frozenset(sent), frozenset(held))
