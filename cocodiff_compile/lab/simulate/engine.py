"""Discrete events: one rank's program on the machine.

Resources are the compute stream and, per link class, the rank's port or its share of a NIC. Kernels
run one after the other. A `Start` issues a collective and the stream goes on; a `Wait` blocks it.
Collectives of one process group run one after the other; those of different groups run side by
side. A collective first pays the latencies of its messages, then moves its bytes over all its link
classes at once, and is done when the last of them is. Link classes do not disturb each other;
collectives on the same link class share it equally (n of them take n times as long).

One rank is enough. Every rank runs the same program over the same sizes, each axis of the machine
looks alike from each place on it, and whoever shares a NIC with this rank sends when it does; so
all timelines are equal and a rank's share of a NIC is constant: the link divided by
`ranks_per_link`. What this leaves out is noise: late ranks, other jobs, adaptive routing.

Alone, a collective takes exactly what the cost model says (`phase_seconds`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cocodiff_compile.cost.exchanges import phase_seconds, traffic
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.lab.simulate.program import Compute, Program, Start, Wait
from cocodiff_compile.topology.axes import Link, Topology

_DONE_S = 1e-12
"""What is left of a flow after subtractions that should have left nothing."""


@dataclass(frozen=True)
class Demand:
    """What one collective asks for: seconds of latency, then seconds of each link class, alone."""

    latency_s: float
    link_s: dict[str, float]


def demand(topology: Topology, axes: tuple[str, ...], size_bytes: float) -> Demand:
    """The slowest link class takes what the cost model says, the others in proportion."""
    flows = traffic(topology, axes, size_bytes)
    total = phase_seconds(topology, axes, size_bytes)
    latency = min(total, sum(flow.messages * flow.link.latency_s for flow in flows))
    alone = {flow.link.name: flow.size_bytes / _share(flow.link) for flow in flows}
    longest = max(alone.values(), default=0.0)
    scale = (total - latency) / longest if longest else 0.0
    return Demand(latency, {name: scale * seconds for name, seconds in alone.items()})


def _share(link: Link) -> float:
    return min(link.bytes_per_s, link.both_ways_bytes_per_s / 2) / link.ranks_per_link


@dataclass(frozen=True)
class Span:
    """Something that occupied a track: "compute", "wait", or a link class of a process group."""

    track: str
    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """What came out. `spans` are in order of their ends."""

    step_s: float
    compute_s: float
    exposed_s: float
    """Time in which the compute stream stood still for a collective."""
    in_flight_s: float
    """Time in which at least one collective ran, hidden or not."""
    spans: tuple[Span, ...]

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.step_s if self.step_s else 0.0


def simulate_program(program: Program, topology: Topology) -> Timeline:
    """Runs `program` to its end, collectives nobody waits for included."""
    return _Engine(program, topology).run()


@dataclass
class _Collective:
    start: Start
    latency_left: float
    links_left: dict[str, float]
    began_s: float = 0.0
    moving_since_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.latency_left <= _DONE_S and not self.links_left


@dataclass
class _Engine:
    program: Program
    topology: Topology
    now_s: float = 0.0
    place: int = 0
    kernel_ends_s: float | None = None
    queues: dict[tuple[str, ...], deque[_Collective]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    finished: set[int] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)
    blocked_since_s: float | None = None

    def run(self) -> Timeline:
        self._advance_program()
        while self.kernel_ends_s is not None or any(self.queues.values()):
            self._pass_time(self._next_event_in())
            self._advance_program()
        if self.place < len(self.program):
            raise InvariantError(f"simulate: {self.program[self.place]} was never started")
        return self._timeline()

    def _advance_program(self) -> None:
        """Everything the compute stream can do now, up to the next kernel or a wait that blocks."""
        if self.kernel_ends_s is not None and self.now_s < self.kernel_ends_s:
            return
        self.kernel_ends_s = None
        while self.place < len(self.program):
            step = self.program[self.place]
            if isinstance(step, Wait) and step.ticket not in self.finished:
                if self.blocked_since_s is None:
                    self.blocked_since_s = self.now_s
                return
            self._unblock()
            self.place += 1
            if isinstance(step, Start):
                self._issue(step)
            elif isinstance(step, Compute):
                self.kernel_ends_s = self.now_s + step.seconds
                self._span("compute", step.name, self.now_s, self.kernel_ends_s)
                return

    def _unblock(self) -> None:
        if self.blocked_since_s is not None:
            self._span("wait", "wait", self.blocked_since_s, self.now_s)
            self.blocked_since_s = None

    def _issue(self, start: Start) -> None:
        asked = demand(self.topology, start.axes, start.size_bytes)
        links = {name: left for name, left in asked.link_s.items() if left > _DONE_S}
        queue = self.queues[start.axes]
        queue.append(_Collective(start, asked.latency_s, links))
        if len(queue) == 1:
            self._begin(queue[0])

    def _begin(self, collective: _Collective) -> None:
        collective.began_s = self.now_s
        collective.moving_since_s = self.now_s + collective.latency_left

    def _running(self) -> list[_Collective]:
        return [queue[0] for queue in self.queues.values() if queue]

    def _sharers(self) -> dict[str, int]:
        """How many collectives move bytes over each link class now."""
        count: dict[str, int] = defaultdict(int)
        for collective in self._running():
            if collective.latency_left <= _DONE_S:
                for name in collective.links_left:
                    count[name] += 1
        return count

    def _next_event_in(self) -> float:
        sharers = self._sharers()
        times = [] if self.kernel_ends_s is None else [self.kernel_ends_s - self.now_s]
        for collective in self._running():
            if collective.latency_left > _DONE_S:
                times.append(collective.latency_left)
            else:
                times += [left * sharers[name] for name, left in collective.links_left.items()]
        return max(0.0, min(times, default=0.0))

    def _pass_time(self, seconds: float) -> None:
        sharers = self._sharers()
        ends = self.kernel_ends_s
        self.now_s += seconds
        if ends is not None and ends - self.now_s <= _DONE_S:
            self.now_s = max(self.now_s, ends)
        for collective in self._running():
            if collective.latency_left > _DONE_S:
                collective.latency_left -= seconds
            else:
                self._move(collective, seconds, sharers)
            if collective.is_done:
                self._finish(collective)

    def _move(self, collective: _Collective, seconds: float, sharers: dict[str, int]) -> None:
        for name in list(collective.links_left):
            collective.links_left[name] -= seconds / sharers[name]
            if collective.links_left[name] <= _DONE_S:
                del collective.links_left[name]
                track = f"{name} ({'+'.join(collective.start.axes)})"
                self._span(track, collective.start.name, collective.moving_since_s, self.now_s)

    def _finish(self, collective: _Collective) -> None:
        start = collective.start
        self.finished.add(start.ticket)
        track = f"group {'+'.join(start.axes)}"
        self._span(track, start.name, collective.began_s, self.now_s)
        queue = self.queues[start.axes]
        queue.popleft()
        if queue:
            self._begin(queue[0])

    def _span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        self.spans.append(Span(track, name, start_s, end_s))

    def _timeline(self) -> Timeline:
        self._unblock()
        compute_s = sum(span.seconds for span in self.spans if span.track == "compute")
        return Timeline(
            step_s=self.now_s,
            compute_s=compute_s,
            exposed_s=max(0.0, self.now_s - compute_s),
            in_flight_s=_covered(span for span in self.spans if span.track.startswith("group ")),
            spans=tuple(sorted(self.spans, key=lambda span: span.end_s)),
        )


def _covered(spans: Iterable[Span]) -> float:
    """Seconds covered by at least one span."""
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        covered += max(0.0, span.end_s - max(until, span.start_s))
        until = max(until, span.end_s)
    return covered
