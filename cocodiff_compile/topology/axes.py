# SPDX-License-Identifier: Apache-2.0
"""Describes a topology as ordered axes, innermost first, and the coordinates of each rank on them.

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
"""Plans are tried one by one, and their number is about 3 to the power of the axes."""


@dataclass(frozen=True)
class Link:
    """A link class, with the speeds that one rank sees while the others are idle."""

    name: str
    bytes_per_s: float
    both_ways_bytes_per_s: float
    latency_s: float
    ranks_per_link: float = 1
    """The ranks that share one link of this class when all communicate at once, as on a NIC."""
    unaligned_from_bytes: float | None = None
    """The size per rank above which traffic of neighbours to different partners slows this link
    down by 1 + log2(size / this); None: it does not.
    """


@dataclass(frozen=True)
class Axis:
    """An axis is one level of the machine with `size` neighbours, joined by `link`."""

    name: str
    size: int
    link: Link


@dataclass(frozen=True)
class Topology:
    """A topology is a machine whose ranks fill the product of its axes, the innermost first."""

    name: str
    axes: tuple[Axis, ...]
    copy_bytes_per_s: float
    """How fast one rank packs or unpacks a buffer in its own memory."""
    measured: tuple[MeasuredPhase, ...] = ()
    """Measurements of the live machine, which replace the links' figures where they exist."""

    def __post_init__(self) -> None:
        if len(self.axes) > MAX_AXES:
            raise UserError(
                f"topology {self.name!r} has {len(self.axes)} axes; allowed: {MAX_AXES}; merge "
                "axes that have the same link"
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
        """The names of the axes, innermost first."""
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
        """Returns the measurement along exactly these axes that covers the size, or `any_size`."""
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
        """Returns the coordinate of a rank on each axis, innermost first."""
        if not 0 <= rank < self.num_ranks:
            raise UserError(
                f"topology {self.name!r} has ranks 0 to {self.num_ranks - 1}, not {rank}"
            )
        coordinates = []
        for axis in self.axes:
            rank, coordinate = divmod(rank, axis.size)
            coordinates.append(coordinate)
        return tuple(coordinates)

    def rank_at(self, coordinates: Iterable[int]) -> int:
        """Returns the rank at these coordinates, innermost first."""
        rank, stride = 0, 1
        for axis, coordinate in zip(self.axes, coordinates, strict=True):
            rank += coordinate * stride
            stride *= axis.size
        return rank

    def ranks_along(self, rank: int, names: Iterable[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` at most on the named axes, in rank order."""
        wanted = {self.axis(name).name for name in names}
        mine = self.coordinates(rank)
        ranges = [
            range(axis.size) if axis.name in wanted else (coordinate,)
            for axis, coordinate in zip(self.axes, mine, strict=True)
        ]
        return tuple(sorted(map(self.rank_at, itertools.product(*ranges))))

    def for_ranks(self, num_ranks: int) -> Topology:
        """Returns this topology if it has exactly `num_ranks`. Raises UserError otherwise."""
        if num_ranks != self.num_ranks:
            sizes = " x ".join(f"{axis.size} {axis.name}" for axis in self.axes)
            raise UserError(
                f"topology {self.name!r} has {self.num_ranks} ranks ({sizes}), the group has "
                f"{num_ranks}; choose a topology that fills the group"
            )
        return self
