"""A topology as ordered axes, innermost first, and where each rank stands on them.

Rank numbers count the innermost axis fastest, as launchers do: on Aurora (2 tiles x 6 GPUs x nodes)
ranks 0 and 1 are the tiles of the first GPU, ranks 0 to 11 its node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from cocodiff_compile.errors import UserError
from cocodiff_compile.topology.measured_phase import MeasuredPhase

MAX_RANKS = 1 << 20
MAX_AXES = 6
"""Plans are tried one by one, and there are about 3 to the power of the axes."""


@dataclass(frozen=True)
class Link:
    """One class of links. Speeds are those that one rank sees while the others rest."""

    name: str
    bytes_per_s: float
    both_ways_bytes_per_s: float
    latency_s: float
    ranks_per_link: float = 1
    """Ranks that share one link of this class when all of them talk at once, as on a NIC."""
    unaligned_from_bytes: float | None = None
    """Above this size per rank, traffic of neighbours to different partners slows this link down
    by 1 + log2(size / this); None: it does not.
    """


@dataclass(frozen=True)
class Axis:
    """`size` neighbours along one level of the machine, joined by `link`."""

    name: str
    size: int
    link: Link


@dataclass(frozen=True)
class Topology:
    """A machine whose ranks fill the product of its axes; `axes[0]` is the innermost."""

    name: str
    axes: tuple[Axis, ...]
    copy_bytes_per_s: float
    """How fast one rank packs or unpacks a buffer in its own memory."""
    measured: tuple[MeasuredPhase, ...] = ()
    """What was measured on the live machine; stands in for the links where it is there."""

    def __post_init__(self) -> None:
        if len(self.axes) > MAX_AXES:
            raise UserError(
                f"topology {self.name!r} has {len(self.axes)} axes; allowed: {MAX_AXES}; make one "
                "axis of those that are joined alike"
            )
        if self.num_ranks > MAX_RANKS:
            raise UserError(f"topology {self.name!r} has more than {MAX_RANKS} ranks")
        for phase in self.measured:
            for name in phase.axes:
                self.axis(name)

    @property
    def num_ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Innermost first."""
        return tuple(axis.name for axis in self.axes)

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = ", ".join(self.axis_names)
        raise UserError(f"topology {self.name!r} has no axis {name!r}; it has: {names}")

    def measured_along(
        self, names: Iterable[str], size_bytes: float, in_flight: int = 1, any_size: bool = False
    ) -> MeasuredPhase | None:
        """What was measured along exactly these axes, if it covers the size or any will do."""
        wanted = set(names)
        return next(
            (
                phase
                for phase in self.measured
                if set(phase.axes) == wanted
                and phase.in_flight == in_flight
                and (any_size or phase.covers(size_bytes))
            ),
            None,
        )

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The place of a rank on each axis, innermost first."""
        self._refuse_unknown_rank(rank)
        places = []
        for axis in self.axes:
            rank, place = divmod(rank, axis.size)
            places.append(place)
        return tuple(places)

    def rank_at(self, coordinates: Iterable[int]) -> int:
        """The rank at a place on each axis, innermost first."""
        rank, stride = 0, 1
        for axis, place in zip(self.axes, coordinates, strict=True):
            rank += place * stride
            stride *= axis.size
        return rank

    def ranks_along(self, rank: int, names: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on the named axes at most, in rank order."""
        wanted = {self.axis(name).name for name in names}
        mine = self.coordinates(rank)
        places = [
            range(axis.size) if axis.name in wanted else (place,)
            for axis, place in zip(self.axes, mine, strict=True)
        ]
        return tuple(sorted(map(self.rank_at, itertools.product(*places))))

    def for_ranks(self, num_ranks: int) -> Topology:
        """This machine, if it has exactly `num_ranks`; else an error that says what would fit."""
        if num_ranks != self.num_ranks:
            sizes = " x ".join(f"{axis.size} {axis.name}" for axis in self.axes)
            raise UserError(
                f"topology {self.name!r} has {self.num_ranks} ranks ({sizes}), the group has "
                f"{num_ranks}; choose a topology that fills the group"
            )
        return self

    def _refuse_unknown_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise UserError(
                f"topology {self.name!r} has ranks 0 to {self.num_ranks - 1}, not {rank}"
            )
