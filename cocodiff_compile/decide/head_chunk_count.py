# SPDX-License-Identifier: Apache-2.0
"""Decides how many head chunks each attention gets, on tasks as they would be with such chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch.fx import Graph

from cocodiff_compile.cost.costs import Costs, ExchangeCost
from cocodiff_compile.cost.tasks import NO_SITE, Task, Tasks
from cocodiff_compile.decide.limits import Limits, pays
from cocodiff_compile.decide.token_chunk_count import token_chunk_tasks
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.passes.chunk_heads import ChunkPlan, plan_chunks
from cocodiff_compile.schedule.list_schedule import list_schedule

CostOf: TypeAlias = "Callable[[str, int], ExchangeCost]"
"""Returns the cost of an exchange in a group, by its bytes per rank."""


def choose_head_chunks(
    graph: Graph,
    recognition: Recognition,
    costs: Costs,
    token_counts: Sequence[int],
    limits: Limits,
) -> dict[int, int]:
    """Returns the number of chunks of each attention that is estimated to take least, if tokens
    will run in one of `token_counts` chunks, whichever is best.
    """
    allowed = {
        place: [n for n in limits.head_chunks if isinstance(plan_chunks(site, n), ChunkPlan)]
        for place, site in enumerate(recognition.sites)
    }
    choices = [
        choose_chunks(tasks, allowed, costs.planned, costs.device.launch_s, limits.head_chunk_gain)
        for tasks in (token_chunk_tasks(graph, recognition, costs, n) for n in token_counts)
    ]
    return min(choices, key=lambda choice: choice.seconds).counts


def in_chunks(
    tasks: Tasks, counts: Mapping[int, int], cost_of: CostOf, launch_s: float
) -> list[Task]:
    """Returns the tasks with site `s` cut into `counts[s]` chunks, each with its own exchanges."""
    made: list[Task] = []
    copies: list[list[int]] = []
    for task in tasks:
        count = counts.get(task.site, 1) if task.site != NO_SITE else 1
        own: list[int] = []
        for chunk in range(count):
            needs = [
                place
                for other in task.needs
                for place in _needed(tasks[other], task, copies[other], chunk)
            ]
            own.append(len(made))
            borrows = tuple(copies[other][0] for other in task.borrows)
            placed = replace(task, needs=tuple(needs), borrows=borrows)
            made.append(placed if count == 1 else _part(placed, count, cost_of, launch_s))
        copies.append(own)
    return made


def _needed(other: Task, task: Task, copies: list[int], chunk: int) -> list[int]:
    """Returns what a chunk needs: its own chunk of the same attention, and all of the rest."""
    return [copies[chunk]] if other.site == task.site and len(copies) > 1 else copies


def _part(task: Task, count: int, cost_of: CostOf, launch_s: float) -> Task:
    if task.kind == "wait":
        return task
    part = replace(task, light_s=task.light_s / count)
    if task.kind == "compute":
        return replace(part, seconds=max(task.seconds / count, launch_s))
    size_bytes = task.size_bytes // count
    cost = cost_of(task.group, size_bytes)
    return replace(part, size_bytes=size_bytes, exchange_s=cost.seconds, busy_s=cost.busy_s)


@dataclass(frozen=True)
class ChunkChoice:
    """Holds the number of chunks of each attention, the estimated time, and what was compared."""

    counts: dict[int, int]
    seconds: float
    estimates_s: dict[int, float]
    """The estimated time of the whole program, by the number of chunks asked for."""


def choose_chunks(
    tasks: Tasks,
    allowed: Mapping[int, Sequence[int]],
    cost_of: CostOf,
    launch_s: float,
    gain: float,
) -> ChunkChoice:
    """Chooses the number of chunks, of those `allowed` per site, beyond which more do not pay."""
    asked = sorted({1, *(count for counts in allowed.values() for count in counts)})
    choices = {
        number: {
            site: max((c for c in counts if c <= number), default=1)
            for site, counts in allowed.items()
        }
        for number in asked
    }
    estimates = {
        number: list_schedule(in_chunks(tasks, counts, cost_of, launch_s)).clock.now_s
        for number, counts in choices.items()
    }
    best = 1
    for number, seconds in estimates.items():
        if pays(estimates[best], seconds, gain):
            best = number
    return ChunkChoice(choices[best], estimates[best], estimates)
