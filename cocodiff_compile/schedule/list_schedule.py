# SPDX-License-Identifier: Apache-2.0
"""Finds an order of tasks that keeps links busy behind computation: a list schedule.

At each turn one task is chosen, by what is known then:

1. Of the exchanges that can be started next, the one whose data are needed first; of those needed
   at the same time, the one with the least work before its start. V, which needs no norm and no
   rotation, comes first by this rule. If the links would run dry for long before that one is ready,
   another that takes much less work goes first.
2. While what the next exchange needs is still on its way, work that does not depend on it, if it
   fits into the gap, or if the links have enough to do meanwhile.
3. Otherwise the rank waits for what arrives first.

Waits are put off until something needs them. Deterministic: a function of the tasks alone. Each
turn looks at a few tasks ahead, so the whole is linear in their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from cocodiff_compile.cost.clock import Clock
from cocodiff_compile.cost.tasks import Tasks, as_bits, closures, places

STARTS_AHEAD = 20
"""How many coming exchanges are looked at: an attention's in four chunks, and some of the next."""
TASKS_AHEAD = 48
"""How many coming computations are looked at to fill a gap: about two blocks of a DiT."""
SIMILAR_WORK_RATIO = 1.1
"""Exchanges whose work differs by less are equally near: estimates are not more exact than that."""
LESS_WORK_RATIO = 0.5
"""Another exchange may go first if it takes less than this part of the urgent one's work: the
urgent one is put off by at most half of its own work.
"""
IDLE_LINK_RATIO = 0.25
"""Links may run dry for this part of the time that an exchange takes on them before another
exchange goes first.
"""


@dataclass(frozen=True)
class Scheduled:
    """Places of all tasks, in an order that respects what they need, and the clock after them."""

    order: tuple[int, ...]
    clock: Clock


def list_schedule(tasks: Tasks) -> Scheduled:
    return _Scheduler(tasks).run()


@dataclass(frozen=True)
class _Ready:
    """A start whose data can be computed now, without standing still."""

    place: int
    needed_at: int
    work_s: float


class _Scheduler:
    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.before = closures(tasks)
        self.needed_at = first_needed(tasks)
        self.starts = as_bits(i for i, task in enumerate(tasks) if task.kind == "start")
        self.waits = as_bits(i for i, task in enumerate(tasks) if task.kind == "wait")
        self.left = (1 << len(tasks)) - 1
        self.clock = Clock(tasks)
        self.order: list[int] = []

    def run(self) -> Scheduled:
        while self.left:
            self._take(self._next())
        return Scheduled(tuple(self.order), self.clock)

    def _take(self, place: int) -> None:
        self.clock.run(place)
        self.left &= ~(1 << place)
        self.order.append(place)

    def _next(self) -> int:
        starts = self._starts_ahead()
        ready = list(self._ready(starts))
        if ready:
            return self._first_missing(self._best(ready))
        next_s = min(map(self._arrival_s, starts), default=float("inf"))
        filler = self._filler(next_s)
        if filler is not None:
            return self._first_missing(filler)
        soonest = min(starts, key=self._arrival_s, default=None)
        if soonest is not None and self._arrival_s(soonest) < float("inf"):
            return self._first_missing(soonest)
        return next(places(self.left))

    def _missing(self, place: int) -> int:
        return self.before[place] & self.left

    def _first_missing(self, place: int) -> int:
        """Returns what comes next on the way to a task: the task itself in the end.

        Computation that can run goes before waits for what the rest needs.
        """
        missing = self._missing(place)
        free = (other for other in places(missing & ~self.waits) if not self._missing(other))
        return next(free, next(places(missing), place))

    def _starts_ahead(self) -> list[int]:
        return list(islice(places(self.left & self.starts), STARTS_AHEAD))

    def _arrival_s(self, place: int) -> float:
        """Returns when the last of what a task waits for is there; never, if it is not sent yet."""
        missing = self._missing(place)
        if missing & self.starts:
            return float("inf")
        exchanges = self.clock.exchanges
        waits = (self.tasks[wait].needs[0] for wait in places(missing & self.waits))
        return max((exchanges[start].end_s for start in waits), default=0.0)

    def _ready(self, starts: Sequence[int]) -> Iterator[_Ready]:
        for place in starts:
            if self._arrival_s(place) <= self.clock.now_s:
                work_s = self.clock.work_s((*places(self._missing(place)), place))
                yield _Ready(place, self.needed_at[place], work_s)

    def _best(self, ready: Sequence[_Ready]) -> int:
        urgent = _most_urgent(ready)
        quick = min(ready, key=lambda item: (item.work_s, item.needed_at, item.place))
        task = self.tasks[urgent.place]
        dry_s = urgent.work_s - max(0.0, self.clock.links_free_s(task) - self.clock.now_s)
        runs_dry = dry_s > IDLE_LINK_RATIO * task.busy_s
        is_quicker = quick.work_s < LESS_WORK_RATIO * urgent.work_s
        return quick.place if runs_dry and is_quicker else urgent.place

    def _filler(self, next_s: float) -> int | None:
        """Returns work for the time until `next_s`."""
        gap_s = next_s - self.clock.now_s
        able = list(self._able())
        fitting = (place for place in able if self.clock.work_s((place,)) <= gap_s)
        first = next(fitting, None)
        if first is not None or not able:
            return first
        seconds, shortest = min((self.clock.work_s((place,)), place) for place in able)
        dry_s = max(0.0, self.clock.now_s + seconds - self.clock.all_links_free_s)
        return shortest if gap_s > dry_s else None

    def _able(self) -> Iterator[int]:
        """Yields computation ahead that could run now, without standing still."""
        for place in islice(places(self.left & ~self.starts & ~self.waits), TASKS_AHEAD):
            if self._arrival_s(place) <= self.clock.now_s and not (
                self._missing(place) & ~self.waits
            ):
                yield place


def _most_urgent(ready: Sequence[_Ready]) -> _Ready:
    """Returns what is needed first, with the least work; of about as much work the one that was
    captured last, which is V where Q and K need no norm either.
    """
    needed_at = min(item.needed_at for item in ready)
    candidates = [item for item in ready if item.needed_at == needed_at]
    least_s = min(item.work_s for item in candidates)
    similar = (item for item in candidates if item.work_s <= SIMILAR_WORK_RATIO * least_s)
    return max(similar, key=lambda item: item.place)


def first_needed(tasks: Tasks) -> list[int]:
    """Returns for each start the place of the first computation that needs what it sends."""
    needed = [len(tasks)] * len(tasks)
    for place, task in reversed(list(enumerate(tasks))):
        own = place if task.kind == "compute" else needed[place]
        for other in task.needs:
            if tasks[other].kind != "compute":
                needed[other] = min(needed[other], own)
    return needed
