"""What the exchanges of a denoising step carry. A few kinds, each compiled once."""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff_compile.graph.delta_code import FULL, code_bytes
from cocodiff_compile.graph.records import Role

ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Travel:
    """`bits` per element of Q's, K's, V's and O's exchange; FULL for one that travels as it is."""

    bits: tuple[int, int, int, int]

    @classmethod
    def all_in(cls, bits: int) -> Travel:
        return cls((bits,) * 4)

    def bits_of(self) -> dict[Role, int]:
        return dict(zip(ROLES, self.bits, strict=True))

    @property
    def is_full(self) -> bool:
        return all(bits == FULL for bits in self.bits)

    def sent_share(self, element_bits: int, group: int) -> float:
        """Bytes that are sent, over those of all in full."""
        coded = {bits: 8 * code_bytes(bits, group) / (group * element_bits) for bits in self.bits}
        return sum(1.0 if bits == FULL else coded[bits] for bits in self.bits) / len(self.bits)

    def __str__(self) -> str:
        if self.is_full:
            return "in full"
        return " ".join(
            f"{role.upper()}{'full' if bits == FULL else bits}"
            for role, bits in self.bits_of().items()
        )


IN_FULL = Travel.all_in(FULL)
