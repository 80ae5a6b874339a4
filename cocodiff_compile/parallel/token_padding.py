"""Pads tokens with zeros so that they divide by the Ulysses degree, and finds the padding after the
exchange.

Zeros are appended to a whole sequence; then every rank takes its share. Five text and seven image
tokens on four ranks, `.` for a row of zeros:

    text  [a b | c d | e . | . .]          image  [A B | C D | E F | G .]

Attention over both gathers the ranks' rows one after the other:

    keys  [a b A B | c d C D | e . E F | . . G .]      real rows 0-9, 10-12 and 14-15

Padded keys and values are dropped there; nothing reads the results of padded queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch.nn import functional

from cocodiff_compile.ir.layout import Size

TEXT, IMAGE = "text", "image"

Span: TypeAlias = "tuple[Size, Size]"
"""The first row, and one past the last."""


class TokenPadding:
    """Holds the padding of one model's tokens in the call that is in progress, by stream.

    The hook that splits a stream writes it at every call; the attentions and the gathering hook
    read it. Each parallelised model has its own. It is state because nothing that reaches an
    attention through the model's own code could carry it. A compiled block guards on the numbers it
    read, and calls of one model do not overlap, since their collectives would mix.
    """

    def __init__(self, degree: int, streams: Iterable[str]) -> None:
        self.degree = degree
        # None where the tokens divide: a symbolic share, written here, would become an output.
        self._padded: dict[str, tuple[Size, int] | None] = dict.fromkeys(streams)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._padded)

    def set(self, stream: str, num_tokens: Size | None) -> None:
        """Sets the tokens of the whole sequence; None if the stream is not split in this call."""
        self._padded[stream] = None
        if num_tokens is not None and (pad := missing(num_tokens, self.degree)):
            self._padded[stream] = ((num_tokens + pad) // self.degree, pad)

    def pad_of(self, stream: str) -> int:
        """Returns the number of rows of zeros after the stream's last token."""
        padded = self._padded[stream]
        return 0 if padded is None else padded[1]

    def is_padded(self, streams: Sequence[str]) -> bool:
        return any(self._padded[stream] is not None for stream in streams)

    def real_share(self, stream: str, num_local: int, rank: int) -> int:
        """Returns how many of the `num_local` rows that `rank` has of a stream are tokens.

        Raises ValueError if the rows are not the rank's share of it.
        """
        if not self.is_padded(self.streams):
            return num_local
        share, pad = self._padded.get(stream, (0, 0)) or (num_local, 0)
        if share != num_local:
            raise ValueError(
                f"A cache decides from {num_local} rows, which are not this rank's share of "
                f"{stream!r}, and some of them may be padding: pad the tokens to a multiple of "
                f"{self.degree}, choose a degree that divides them, or disable the cache."
            )
        return max(0, min(num_local, num_local * (self.degree - rank) - pad))

    def real_rows(self, streams: Sequence[str], num_local: Size) -> list[Span]:
        """Returns where real tokens are after an exchange that gathered `num_local` rows of every
        rank.

        A rank's rows must be those of its shares of `streams`, in this order. Raises ValueError if
        they are not, since the attention then reads something other than what was split.
        """
        padded = [self._padded[stream] for stream in streams]
        known = [share_and_pad[0] for share_and_pad in padded if share_and_pad is not None]
        rest, num_even = num_local - sum(known), len(streams) - len(known)
        if num_even > 1 or (rest != 0 if num_even == 0 else rest < 1):
            raise ValueError(
                f"An attention has {num_local} keys on this rank, which are not the shares of "
                f"{list(streams)}, of which those that do not divide are {known}: pad the tokens "
                f"to a multiple of {self.degree} yourself, or choose a degree that divides them."
            )
        # The one stream that divides has what the others leave.
        return real_rows([share_and_pad or (rest, 0) for share_and_pad in padded], self.degree)


def missing(num_tokens: Size, degree: int) -> int:
    """Returns how many tokens are missing to the next multiple of `degree`.

    It is found by comparing, not computed, so that it is a constant where `num_tokens` is symbolic,
    and the sum of both is known to divide. A graph serves one remainder.
    """
    for pad in range(degree):
        if (num_tokens + pad) % degree == 0:
            return pad
    raise ValueError(f"a degree of {degree}; allowed: 1 or more")


def pad_end(tensor: torch.Tensor, dim: int, pad: int) -> torch.Tensor:
    """Appends `pad` zeros after the last element of `dim`."""
    behind = tensor.dim() - 1 - dim % tensor.dim()
    return functional.pad(tensor, [0, 0] * behind + [0, pad]) if pad else tensor


def real_rows(streams: Sequence[tuple[Size, int]], degree: int) -> list[Span]:
    """Returns the spans of real rows, given each stream's (share, pad)."""
    padded = [_padded_by_rank(share, pad, degree) for share, pad in streams]
    spans: list[Span] = []
    start: Size = 0
    row: Size = 0
    holds_tokens = False
    for rank in range(degree):
        for (share, _), by_rank in zip(streams, padded, strict=True):
            num_padded = by_rank[rank]
            row = row + share
            holds_tokens = holds_tokens or num_padded == 0 or bool(share != num_padded)
            if num_padded:
                spans += [(start, row - num_padded)] if holds_tokens else []
                start, holds_tokens = row, False
    return spans + ([(start, row)] if holds_tokens else [])


def _padded_by_rank(share: Size, pad: int, degree: int) -> list[int]:
    """Returns the padded rows of each rank; the last rank's share is filled with padding first."""
    counts: list[int] = []
    for _ in range(degree):
        counts.insert(0, _at_most(share, pad - sum(counts)))
    return counts


def _at_most(share: Size, bound: int) -> int:
    """Returns the smaller of both, as a constant."""
    for number in range(1, bound):
        if share == number:
            return number
    return bound


def keep_rows(tensor: torch.Tensor, dim: int, spans: Sequence[Span]) -> torch.Tensor:
    """Returns the rows of `dim` that lie in `spans`."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
