"""How long a program takes in some order: one compute stream, and links that carry one exchange
after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cocodiff_compile.cost.tasks import Order, Task, Tasks, places


@dataclass(frozen=True)
class Span:
    """When a task ran. For a start: when its exchange was on the links."""

    place: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass
class Clock:
    """Time of one rank while tasks run; every rank does the same, so one is enough."""

    tasks: Tasks
    now_s: float = 0.0
    computed_s: float = 0.0
    exposed_s: float = 0.0
    """Time in which the rank stood still for an exchange."""
    arrives_s: dict[int, float] = field(default_factory=dict)
    """By the place of a start: when what it sends is there."""
    spans: list[Span] = field(default_factory=list)
    _free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _light_done: int = 0

    def run(self, place: int) -> None:
        task = self.tasks[place]
        if task.kind == "wait":
            self._stand_still(place, self.arrives_s[task.needs[0]])
            return
        seconds = self.work_s((place,))
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self.computed_s += seconds
        self._light_done |= self._light_of((place,))
        if task.kind == "compute":
            self.spans.append(Span(place, begin_s, self.now_s))
        else:
            self._send(place, task)

    def work_s(self, wanted: Iterable[int]) -> float:
        """Seconds of computation for all of these tasks, light kernels once."""
        wanted = tuple(wanted)
        light_s = sum(self.tasks[place].light_s for place in places(self._light_of(wanted)))
        return light_s + sum(self.tasks[place].seconds for place in wanted)

    def _light_of(self, wanted: Iterable[int]) -> int:
        """The tasks, as bits, whose light kernels are still to run for these."""
        found, stack = 0, list(wanted)
        while stack:
            place = stack.pop()
            if not (found | self._light_done) >> place & 1:
                found |= 1 << place
                stack += self.tasks[place].borrows
        return found

    def links_free_s(self, task: Task) -> float:
        """From when on the links of a start are free."""
        return max((self._free_s[link] for link in task.links), default=0.0)

    @property
    def all_links_free_s(self) -> float:
        return max(self._free_s.values(), default=0.0)

    def _send(self, place: int, task: Task) -> None:
        free_s = self.links_free_s(task)
        begin_s = max(self.now_s, free_s)
        end_s = begin_s + (task.exchange_s if free_s <= self.now_s else task.busy_s)
        self._free_s.update(dict.fromkeys(task.links, begin_s + task.busy_s))
        self.arrives_s[place] = end_s
        self.spans.append(Span(place, begin_s, end_s))

    def _stand_still(self, place: int, until_s: float) -> None:
        begin_s, self.now_s = self.now_s, max(self.now_s, until_s)
        self.exposed_s += self.now_s - begin_s
        self.spans.append(Span(place, begin_s, self.now_s))


def run_in_order(tasks: Tasks, order: Order) -> Clock:
    """The clock after all tasks."""
    clock = Clock(tasks)
    for place in order:
        clock.run(place)
    return clock
