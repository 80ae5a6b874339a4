# SPDX-License-Identifier: Apache-2.0
"""Holds what was decided about sharing tokens out, as plain data for tables, drawings and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionShare:
    """Says how ranks compute one attention."""

    node: str
    module: str
    mode: str
    """Ulysses, cross, batch or whole."""
    could_be: str
    """The mode in which ranks could compute it; empty if in none."""
    why_whole: str
    heads: int
    padded_heads: int
    tokens: tuple[int, ...]
    """The lengths of what is shared out one by one, such as text and image."""
    padded_tokens: tuple[int, ...]
    keys: int
    """How many tokens each query sees."""
    exchange_s: float
    """The time of its exchanges, in the mode that it could have."""
    saved_s: float
    """The time of computing that a share saves a rank, in that mode."""


@dataclass(frozen=True)
class Gather:
    """Names a node that is shared out and read as a whole, and the readers that need it so."""

    node: str
    module: str
    shape: tuple[int, ...]
    size_bytes: int
    seconds: float
    reader: str
    reader_module: str
    why: str
    """Why the first reader needs the whole."""
    num_readers: int


@dataclass(frozen=True)
class Slice:
    """Names a whole of which every rank takes its share."""

    node: str
    module: str
    shape: tuple[int, ...]
    share_bytes: int
    seconds: float
    num_readers: int


@dataclass(frozen=True)
class LeftWhole:
    """Counts the ops of one kind that stay whole for one reason."""

    op: str
    why: str
    count: int
    seconds: float
    module: str
    """Where the first of them is."""


@dataclass(frozen=True)
class ModuleShare:
    """Sums up the ops of a module of the model, such as one block."""

    module: str
    num_shared: int
    num_whole: int
    shared_s: float
    """The time of one rank for what is shared out, as if it computed all of it."""
    whole_s: float
    attentions: tuple[str, ...]
    num_gathers: int
    gathered_bytes: int

    @property
    def shared_part(self) -> float:
        """Returns the part that is shared out: of the time, of the ops where they take none."""
        if self.shared_s + self.whole_s:
            return self.shared_s / (self.shared_s + self.whole_s)
        return self.num_shared / max(1, self.num_shared + self.num_whole)


@dataclass(frozen=True)
class ShardReport:
    """Says what of a graph is shared out over ranks, what is not, and why.

    Ops are counted without those that compute nothing, such as views. Times are estimates.
    """

    num_ranks: int
    is_applied: bool
    """Whether it gains enough to be done."""
    num_shared: int
    num_whole: int
    num_without_tokens: int
    """How many of the whole ops no tokens were followed to."""
    num_taken: int
    """How many inputs come as shares of another compiled block."""
    num_kept: int
    """How many outputs stay shares for another compiled block."""
    one_rank_s: float
    """The time of a step in which every rank computes all."""
    whole_part: float
    """The part of that time which is whole on every rank."""
    step_s: float
    """The time of a step that is shared out, with exchanges, gathers and slices."""
    attentions: tuple[AttentionShare, ...]
    gathers: tuple[Gather, ...]
    slices: tuple[Slice, ...]
    left_whole: tuple[LeftWhole, ...]
    """What tokens were followed to and is whole nevertheless, the longest first."""
    modules: tuple[ModuleShare, ...]
    """The modules of the model in the order of the program."""

    @property
    def gain(self) -> float:
        """Returns by how much a step is estimated to get faster."""
        return self.one_rank_s / self.step_s if self.step_s else 1.0

    def to_data(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ShardReport:
        """Returns the report that `to_data` made these from, through JSON or not."""
        rows = {
            name: tuple(kind(**_with_tuples(row)) for row in data[name])
            for name, kind in _ROWS.items()
        }
        return cls(**{**data, **rows})


_ROWS: Mapping[str, Any] = {
    "attentions": AttentionShare,
    "gathers": Gather,
    "slices": Slice,
    "left_whole": LeftWhole,
    "modules": ModuleShare,
}
"""The fields of a report that are rows of another record."""


def _with_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
