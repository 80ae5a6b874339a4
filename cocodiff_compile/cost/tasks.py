# SPDX-License-Identifier: Apache-2.0
"""Describes a rank's program as tasks: what computes, starts an exchange, or waits for one.

Pure data, in the order the program was captured in, so that schedules can be made and judged
without a graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cocodiff_compile.cost.timeline import Work

TaskKind: TypeAlias = 'Literal["compute", "start", "wait"]'

NO_SITE = -1


@dataclass(frozen=True)
class Task:
    """One step.

    compute  takes `seconds`
    start    sends: `busy_s` on each of `links`, and what it sends is there after `exchange_s` if it
             has them for itself
    wait     lasts until what the start `needs[0]` sent is there

    Before that come the light kernels that feed it, `light_s`, and those of the tasks it `borrows`
    from, if none that needs them ran before.
    """

    name: str
    kind: TaskKind
    needs: tuple[int, ...]
    """Places of earlier tasks that must be done, the nearest ones."""
    seconds: float = 0.0
    light_s: float = 0.0
    borrows: tuple[int, ...] = ()
    exchange_s: float = 0.0
    busy_s: float = 0.0
    links: tuple[str, ...] = ()
    size_bytes: int = 0
    group: str = ""
    site: int = NO_SITE
    """The attention whose exchanges and computation this belongs to."""
    work: Work = "kernel"
    """What it mainly computes, for timelines."""


Tasks: TypeAlias = "Sequence[Task]"
Order: TypeAlias = "Sequence[int]"


def captured_order(tasks: Tasks) -> Order:
    return range(len(tasks))


def places(bits: int) -> Iterator[int]:
    """Yields the places of the ones in a number, from the lowest."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def as_bits(numbers: Iterable[int]) -> int:
    return functools.reduce(operator.or_, (1 << number for number in numbers), 0)


def closures(tasks: Tasks) -> list[int]:
    """Returns for each task all that must be done before it, as bits."""
    found: list[int] = []
    for task in tasks:
        bits = 0
        for place in task.needs:
            bits |= found[place] | 1 << place
        found.append(bits)
    return found
