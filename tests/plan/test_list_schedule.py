# SPDX-License-Identifier: Apache-2.0
"""Orders of tasks, without a graph: what goes first, what hides where, how many chunks pay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cocodiff_compile.cost.clock import run_in_order
from cocodiff_compile.cost.costs import ExchangeCost
from cocodiff_compile.cost.tasks import Task, Tasks, captured_order
from cocodiff_compile.decide.head_chunk_count import choose_chunks, in_chunks
from cocodiff_compile.decide.limits import Limits
from cocodiff_compile.schedule.estimate import estimate_schedule
from cocodiff_compile.schedule.list_schedule import list_schedule

MS = 1e-3
LAUNCH_S = 1e-5


class Program:
    """Tasks in the order a model calls them, which is stock's order too."""

    def __init__(self, exchange_ms: float) -> None:
        self.tasks: list[Task] = []
        self.exchange_s = exchange_ms * MS

    def compute(self, name: str, ms: float, *needs: int, site: int = -1) -> int:
        return self._add(Task(name, "compute", needs, ms * MS, site=site))

    def exchange(self, name: str, pack_ms: float, need: int, site: int) -> int:
        start = Task(
            f"start {name}",
            "start",
            (need,),
            light_s=pack_ms * MS,
            exchange_s=self.exchange_s,
            busy_s=self.exchange_s,
            links=("net",),
            size_bytes=1000,
            group="0",
            site=site,
        )
        return self._add(Task(f"wait {name}", "wait", (self._add(start),), site=site))

    def block(self, site: int, before: Sequence[int], parallel_mlp: bool) -> int:
        """Projections of 5 ms, an attention of 12 ms, an MLP of 40 ms; returns its last task."""
        q, k, v = (self.compute(f"to_{role} {site}", 5, *before) for role in "qkv")
        waits = [
            self.exchange(f"{role} {site}", pack_ms, projected, site)
            for role, pack_ms, projected in (("q", 2, q), ("k", 2, k), ("v", 0.5, v))
        ]
        attended = self.compute(f"attention {site}", 12, *waits, site=site)
        o = self.exchange(f"o {site}", 0.5, attended, site)
        if parallel_mlp:
            mlp = self.compute(f"mlp {site}", 40, *before)
            return self.compute(f"to_out {site}", 5, o, mlp)
        return self.compute(f"mlp {site}", 40, self.compute(f"to_out {site}", 5, o))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def model(exchange_ms: float, blocks: int = 4, parallel_mlp: bool = True) -> list[Task]:
    program = Program(exchange_ms)
    last: list[int] = []
    for site in range(blocks):
        last = [program.block(site, last, parallel_mlp)]
    return program.tasks


def names(tasks: Tasks, order: Sequence[int]) -> list[str]:
    return [tasks[place].name for place in order]


def is_valid(tasks: Tasks, order: Sequence[int]) -> bool:
    place_of = {place: when for when, place in enumerate(order)}
    return sorted(order) == list(range(len(tasks))) and all(
        place_of[need] < place_of[place] for place, task in enumerate(tasks) for need in task.needs
    )


def linear_cost(seconds: float) -> ExchangeCost:
    return ExchangeCost(seconds, seconds, ("net",))


def test_v_goes_first_and_waits_go_last() -> None:
    tasks = model(exchange_ms=6, blocks=1)
    order = names(tasks, list_schedule(tasks).order)
    assert order.index("start v 0") < order.index("to_q 0")
    assert order.index("start v 0") < order.index("to_k 0")
    starts = [order.index(f"start {role} 0") for role in "qkv"]
    assert max(starts) < min(order.index(f"wait {role} 0") for role in "qkv")


def test_the_way_out_hides_behind_what_does_not_need_it() -> None:
    tasks = model(exchange_ms=2, blocks=2)
    order = names(tasks, list_schedule(tasks).order)
    for site in range(2):
        start, wait = order.index(f"start o {site}"), order.index(f"wait o {site}")
        assert start < wait
        assert order.index(f"mlp {site}") < wait


def test_independent_work_fills_the_longest_gap_on_the_way_in() -> None:
    """The exchanges of Q, K and V together outlast any computation: the MLP runs meanwhile."""
    tasks = model(exchange_ms=30, blocks=1)
    order = names(tasks, list_schedule(tasks).order)
    assert order.index("mlp 0") < order.index("attention 0")


@pytest.mark.parametrize("exchange_ms", [0.1, 1, 5, 10, 20, 60])
@pytest.mark.parametrize("parallel_mlp", [True, False])
def test_an_order_is_valid_and_not_slower_than_captured(
    exchange_ms: float, parallel_mlp: bool
) -> None:
    tasks = model(exchange_ms, parallel_mlp=parallel_mlp)
    estimate = estimate_schedule(tasks)
    assert is_valid(tasks, estimate.order)
    assert estimate.after.timeline.step_s <= estimate.before.timeline.step_s * (1 + 1e-9)
    assert estimate.after.timeline.compute_s == pytest.approx(estimate.before.timeline.compute_s)


@pytest.mark.parametrize("seed", range(20))
def test_any_program_gets_a_valid_order(seed: int) -> None:
    rng = random.Random(seed)
    program = Program(exchange_ms=rng.uniform(0.1, 20))
    for number in range(rng.randint(1, 60)):
        size = len(program.tasks)
        computes = [i for i, task in enumerate(program.tasks) if task.kind != "start"]
        needs = tuple(sorted(rng.sample(computes, min(len(computes), rng.randint(0, 3)))))
        if size and needs and rng.random() < 0.4:
            program.exchange(str(number), rng.uniform(0, 2), needs[0], site=0)
        else:
            program.compute(str(number), rng.uniform(0, 20), *needs)
    order = list_schedule(program.tasks).order
    assert is_valid(program.tasks, order)
    assert order == list_schedule(program.tasks).order


def test_hidden_and_exposed_times_are_those_of_the_order() -> None:
    program = Program(exchange_ms=10)
    first = program.compute("first", 1)
    wait = program.exchange("x", 0, first, site=0)
    program.compute("free", 4)
    program.compute("last", 1, wait)
    order = captured_order(program.tasks)
    captured = run_in_order(program.tasks, order)
    assert captured.now_s == pytest.approx(16 * MS)
    assert captured.timeline.exposed_s == pytest.approx(10 * MS)
    after = estimate_schedule(program.tasks).after
    assert after.timeline.step_s == pytest.approx(12 * MS)
    (exchange,) = after.exchanges
    assert exchange.exposed_s == pytest.approx(6 * MS)
    assert exchange.hidden_s == pytest.approx(4 * MS)
    assert exchange.behind == ("free",)


def test_an_exchange_among_others_takes_its_links_only_as_long_as_it_sends() -> None:
    start = Task("s", "start", (), exchange_s=10 * MS, busy_s=4 * MS, links=("net",))
    tasks = [start] * 3
    tasks += [Task("w", "wait", (place,)) for place in range(3)]
    clock = run_in_order(tasks, captured_order(tasks))
    assert clock.now_s == pytest.approx(12 * MS)  # 4 + 4 + 4, not 30


def test_light_kernels_are_paid_by_the_first_that_needs_them() -> None:
    shared = [
        Task("a", "compute", (), 1 * MS, light_s=5 * MS),
        Task("b", "compute", (), 1 * MS, light_s=2 * MS, borrows=(0,)),
    ]
    for order in ((0, 1), (1, 0)):
        assert run_in_order(shared, order).now_s == pytest.approx(9 * MS)
    clock = run_in_order(shared, (1,))
    assert clock.now_s == pytest.approx(8 * MS)
    assert clock.work_s((0,)) == pytest.approx(1 * MS)


def test_chunks_of_one_attention_use_their_own_exchanges_only() -> None:
    tasks = model(exchange_ms=6, blocks=1)
    chunked = in_chunks(tasks, {0: 2}, lambda _group, size: linear_cost(size * 6e-6), LAUNCH_S)
    attentions = [task for task in chunked if task.name == "attention 0"]
    assert len(attentions) == 2
    assert not set(attentions[0].needs) & set(attentions[1].needs)
    (to_out,) = (task for task in chunked if task.name == "to_out 0")
    assert len(to_out.needs) == 3  # both output exchanges, and the MLP
    for before, after in zip(_totals(tasks), _totals(chunked), strict=True):
        assert after == pytest.approx(before, rel=0.01)  # launches come on top


def _totals(tasks: Tasks) -> tuple[float, float]:
    computed_s = sum(task.seconds + task.light_s for task in tasks)
    return computed_s, sum(task.exchange_s for task in tasks)


GAIN = Limits().head_chunk_gain
ALLOWED = dict.fromkeys(range(4), (2, 4))


def test_chunks_are_taken_where_exchanges_are_exposed() -> None:
    choice = choose_chunks(
        model(exchange_ms=8), ALLOWED, lambda _group, size: linear_cost(size * 8e-6), LAUNCH_S, GAIN
    )
    assert set(choice.counts.values()) <= {2, 4}
    assert min(choice.estimates_s[2], choice.estimates_s[4]) < choice.estimates_s[1]


@pytest.mark.parametrize(
    ("exchange_ms", "latency_ms"), [(0.01, 0.0), (8, 8)], ids=["fast links", "latency only"]
)
def test_chunks_are_left_where_they_do_not_pay(exchange_ms: float, latency_ms: float) -> None:
    def cost(_group: str, size: int) -> ExchangeCost:
        return linear_cost(max(latency_ms * MS, size / 1000 * exchange_ms * MS))

    choice = choose_chunks(model(exchange_ms), ALLOWED, cost, LAUNCH_S, GAIN)
    assert set(choice.counts.values()) == {1}


def test_more_chunks_must_save_enough_over_fewer() -> None:
    """They make more code, and cost more than an estimate knows."""
    tasks = model(exchange_ms=8)

    def cost(_group: str, size: int) -> ExchangeCost:
        return linear_cost(size * 8e-6)

    estimates = choose_chunks(tasks, ALLOWED, cost, LAUNCH_S, GAIN).estimates_s
    saved = 1 - estimates[4] / estimates[2]
    assert saved > 0
    for least, chosen in ((0.9 * saved, 4), (1.1 * saved, 2)):
        choice = choose_chunks(tasks, ALLOWED, cost, LAUNCH_S, least)
        assert set(choice.counts.values()) == {chosen}
        assert choice.seconds == choice.estimates_s[chosen]


def test_every_chunk_pays_for_the_start_of_its_exchanges() -> None:
    tasks = [Task("start", "start", (), 3 * MS, size_bytes=1000, group="g", site=0)]
    chunked = in_chunks(tasks, {0: 4}, lambda _group, _size: linear_cost(1 * MS), LAUNCH_S)
    assert [task.seconds for task in chunked] == [3 * MS] * 4


def test_a_site_is_never_cut_into_more_than_it_allows() -> None:
    allowed: dict[int, Sequence[int]] = {0: (), 1: (2,), 2: (2, 4), 3: (3,)}
    choice = choose_chunks(
        model(exchange_ms=8), allowed, lambda _group, size: linear_cost(size * 8e-6), LAUNCH_S, GAIN
    )
    assert choice.counts[0] == 1
    assert all(count == 1 or count in allowed[site] for site, count in choice.counts.items())


def test_the_work_of_scheduling_grows_with_the_program_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in tasks looked at, which no machine's load changes."""
    from cocodiff_compile.schedule import list_schedule as module  # noqa: PLC0415

    looked: list[int] = []
    original = module._Scheduler._arrival_s

    def counted(self: module._Scheduler, place: int) -> float:
        looked.append(place)
        return original(self, place)

    monkeypatch.setattr(module._Scheduler, "_arrival_s", counted)
    per_block = []
    for blocks in (8, 32):
        looked.clear()
        list_schedule(model(exchange_ms=6, blocks=blocks))
        per_block.append(len(looked) / blocks)
    assert per_block[1] < 1.5 * per_block[0]
