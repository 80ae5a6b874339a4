# SPDX-License-Identifier: Apache-2.0
"""Runs a program in some order: one compute stream, and links that carry one exchange after the
other. The list scheduler decides by this clock, and `cocodiff simulate` takes its times from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cocodiff_compile.cost.tasks import Order, Task, Tasks, places
from cocodiff_compile.cost.timeline import COMPUTE, Span, SpanKind, Timeline


@dataclass
class Clock:
    """The time of one rank while tasks run; it stands for all, which run the same program."""

    tasks: Tasks
    now_s: float = 0.0
    exchanges: dict[int, Span] = field(default_factory=dict)
    """When an exchange is on the links, by the place of its start."""
    exposed_s: dict[int, float] = field(default_factory=dict)
    """How long the rank stood still for an exchange, by the place of its start."""
    spans: list[Span] = field(default_factory=list)
    _free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _light_done: int = 0

    def run(self, place: int) -> None:
        task = self.tasks[place]
        if task.kind == "wait":
            begin_s = self.now_s
            self._pass(task.name, "wait", self.exchanges[task.needs[0]].end_s)
            self.exposed_s[task.needs[0]] = self.now_s - begin_s
            return
        seconds = self.work_s((place,))
        self._light_done |= self._light_of((place,))
        kind = task.work if task.kind == "compute" else "start"
        self._pass(task.name, kind, self.now_s + seconds)
        if task.kind == "start":
            self._send(place, task)

    @property
    def timeline(self) -> Timeline:
        return Timeline(tuple(self.spans))

    def work_s(self, wanted: Iterable[int]) -> float:
        """Returns the seconds of computation for all of these tasks, light kernels once."""
        wanted = tuple(wanted)
        light_s = sum(self.tasks[place].light_s for place in places(self._light_of(wanted)))
        return light_s + sum(self.tasks[place].seconds for place in wanted)

    def _light_of(self, wanted: Iterable[int]) -> int:
        """Returns the tasks, as bits, whose light kernels are still to run for these."""
        found, stack = 0, list(wanted)
        while stack:
            place = stack.pop()
            if not (found | self._light_done) >> place & 1:
                found |= 1 << place
                stack += self.tasks[place].borrows
        return found

    def links_free_s(self, task: Task) -> float:
        """Returns the time from which on the links of a start are free."""
        return max((self._free_s[link] for link in task.links), default=0.0)

    @property
    def all_links_free_s(self) -> float:
        return max(self._free_s.values(), default=0.0)

    def _send(self, place: int, task: Task) -> None:
        free_s = self.links_free_s(task)
        begin_s = max(self.now_s, free_s)
        end_s = begin_s + (task.exchange_s if free_s <= self.now_s else task.busy_s)
        self._free_s.update(dict.fromkeys(task.links, begin_s + task.busy_s))
        lane = ", ".join(task.links) or "links"
        self.exchanges[place] = Span(lane, task.name, "exchange", begin_s, end_s)
        self.spans.append(self.exchanges[place])

    def _pass(self, name: str, kind: SpanKind, until_s: float) -> None:
        """Lets the compute stream be busy until then, if that lies ahead."""
        begin_s, self.now_s = self.now_s, max(self.now_s, until_s)
        if self.now_s > begin_s:
            self.spans.append(Span(COMPUTE, name, kind, begin_s, self.now_s))


def run_in_order(tasks: Tasks, order: Order) -> Clock:
    """Returns the clock after all tasks."""
    clock = Clock(tasks)
    for place in order:
        clock.run(place)
    return clock
