# SPDX-License-Identifier: Apache-2.0
"""Describes what the exchanges of a denoising step carry: few kinds, each compiled once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cocodiff_compile.ir.records import Role
from cocodiff_compile.v_major.delta_code import FULL, code_bits

EXACT = "exact"
"""The kind of a denoising step that exchanges everything uncompressed, without a payload."""
ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Payload:
    """A payload describes what the four exchanges of an attention carry.

    `bits` holds the bits per element of the exchanges of Q, K, V and O, FULL for one that is sent
    uncompressed. `skipped_share` is the share of a rank's tokens of which Q, K and V are not sent:
    the tokens whose V changed least. `is_intra_coded` says that coded values are coded by
    themselves instead of as differences, and that no token is skipped. `reuses_output` says that O
    of skipped tokens is neither computed nor sent.
    """

    bits: tuple[int, int, int, int]
    skipped_share: float = 0.0
    is_intra_coded: bool = False
    reuses_output: bool = False

    @classmethod
    def uniform(cls, bits: int, is_intra_coded: bool = False) -> Payload:
        return cls((bits,) * 4, is_intra_coded=is_intra_coded)

    def bits_of(self) -> dict[Role, int]:
        return dict(zip(ROLES, self.bits, strict=True))

    @property
    def is_uncompressed(self) -> bool:
        return all(bits == FULL for bits in self.bits) and not self.skipped_share

    @property
    def is_keyframe(self) -> bool:
        """Returns whether the step needs nothing of earlier ones, as a picture's first must."""
        return self.is_intra_coded or self.is_uncompressed

    def share_of(self, role: Role, element_bits: int, group: int) -> float:
        """Returns a role's share of its uncompressed bytes; `group` elements share a scale."""
        bits = self.bits_of()[role]
        coded = 1.0 if bits == FULL else code_bits(bits, group) / (group * element_bits)
        is_whole = role == "o" and not self.reuses_output
        return coded * (1.0 if is_whole else 1.0 - self.skipped_share)

    def sent_share(self, element_bits: int, group: int) -> float:
        """Returns the bytes sent for all roles, relative to sending them uncompressed."""
        return sum(self.share_of(role, element_bits, group) for role in ROLES) / len(ROLES)

    def __str__(self) -> str:
        if len(set(self.bits)) == 1:
            bits = _shown_bits(self.bits[0])
        else:
            bits = ", ".join(f"{r.upper()} {_shown_bits(b)}" for r, b in self.bits_of().items())
        parts = [bits]
        if self.skipped_share:
            output = ", O too" if self.reuses_output else ""
            parts.append(f"{self.skipped_share:.0%} of tokens skipped{output}")
        return ", ".join([*parts, *["intra-coded"] * self.is_intra_coded])


def _shown_bits(bits: int) -> str:
    return "uncompressed" if bits == FULL else f"{bits} bits"


UNCOMPRESSED = Payload.uniform(FULL)


@dataclass(frozen=True)
class CachedRoles:
    """Names the roles whose values the sender caches, and those that the receiver caches."""

    sent: frozenset[Role]
    held: frozenset[Role]
    coded: frozenset[Role] = frozenset()
    """The roles that are cached even where no tokens are skipped."""

    @classmethod
    def for_payloads(cls, payloads: Iterable[Payload]) -> CachedRoles:
        """Returns the caches that steps of all these kinds need of each other."""
        sent: set[Role] = set()
        held: set[Role] = set()
        coded: set[Role] = set()
        for payload in payloads:
            if payload.is_keyframe:
                continue
            coded |= {role for role, bits in payload.bits_of().items() if bits != FULL}
            if payload.skipped_share:
                sent.add("v")
                # Queries of tokens whose output is reused are not needed.
                held |= {"k", "v", "o" if payload.reuses_output else "q"}
        return cls(frozenset(sent | coded), frozenset(held | coded), frozenset(coded))

    @property
    def without_skipping(self) -> CachedRoles:
        """The caches of an attention that skips no tokens."""
        return CachedRoles(self.coded, self.coded, self.coded)

    def sides_of(self, roles: Iterable[Role]) -> tuple[bool, bool]:
        """Returns whether an exchange of these roles has a cache at sender and at receiver."""
        asked = set(roles)
        return not self.sent.isdisjoint(asked), not self.held.isdisjoint(asked)
