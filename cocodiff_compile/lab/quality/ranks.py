"""Exact and lossy runs of the small trained model, taken in turns on live ranks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.bench.cases import DTYPES
from cocodiff_compile.lab.bench.links import interface_counters, links_are_ours
from cocodiff_compile.lab.bench.local_groups import Collective, local_groups, traffic_between
from cocodiff_compile.lab.bench.set_share import set_share
from cocodiff_compile.lab.progress import Say
from cocodiff_compile.lab.quality.measures import distances
from cocodiff_compile.lab.quality.sample import sample_pictures
from cocodiff_compile.lab.quality.settings import EXACT, QualitySettings, v_major_of
from cocodiff_compile.lab.quality.small_dit import WEIGHTS, load_small_dit
from cocodiff_compile.parallel import parallelize
from cocodiff_compile.ranks.agreement.all_ranks import gathered, largest
from cocodiff_compile.v_major.denoising import StepRecord

_PLAIN = {"v_first": False, "tapa": "off", "head_chunks": 1, "token_chunks": 1}
"""Where time is not what is asked for: the exact passes change no value, and take long to compile.
"""
SHOWN = 6
"""Pictures of each way that are kept to look at."""


@dataclass
class _Way:
    """One way to run the model; lists hold one value per run."""

    name: str
    call: Callable[..., Any]
    pictures: dict[int, Tensor] = field(default_factory=dict)
    """By seed."""
    seconds: list[float] = field(default_factory=list)
    counted_bytes: list[int] = field(default_factory=list)
    """That the busiest node's interface sent, without headers."""
    counted_packets: list[int] = field(default_factory=list)
    history: list[StepRecord] = field(default_factory=list)
    """What travelled in each step of all runs."""

    def forget(self) -> None:
        """What was run to compile is not counted."""
        for item in (
            self.pictures,
            self.seconds,
            self.counted_bytes,
            self.counted_packets,
            self.history,
        ):
            item.clear()


def measure_quality(settings: QualitySettings, say: Say) -> dict[str, Any]:
    """Plain data but for the pictures; all ranks call this and get the same."""
    ways = [_Way(EXACT, torch.compile(_model(settings), fullgraph=True, dynamic=False))]
    seconds = _run(ways[0], settings, 0)
    say(f"{EXACT}: Inductor, ready in {seconds:.0f} s")
    rate_mbit = _set_share(ways[0], settings, say) if settings.share else None
    for name in settings.policies:
        way = _Way(name, _compiled(settings, v_major_of(name)))
        seconds = _run(way, settings, 0)
        say(f"{name}: ready in {seconds:.0f} s")
        ways.append(way)
    for way in ways:
        way.forget()
    turns = itertools.cycle(range(len(ways)))
    for seed in settings.seeds:
        first = next(turns)
        for way in (*ways[first:], *ways[:first]):
            _run(way, settings, seed)
        say(f"pictures {settings.batch * (seed + 1)} of {settings.pictures}")
    return {
        "settings": settings.to_json(),
        "ranks": dist.get_world_size(),
        "rate_mbit": rate_mbit,
        "load_average": os.getloadavg()[0],
        "ways": [_describe(way, ways[0], settings) for way in ways],
    }


def _model(settings: QualitySettings) -> nn.Module:
    model = load_small_dit(Path(settings.weights) if settings.weights else WEIGHTS)
    return parallelize(model.to(DTYPES[settings.dtype]))


def _compiled(settings: QualitySettings, v_major: dict[str, Any]) -> Callable[..., Any]:
    return torch.compile(  # type: ignore[call-overload,no-any-return]
        _model(settings),
        backend="cocodiff",
        fullgraph=True,
        dynamic=False,
        options={"v_major": v_major, **({} if settings.share else _PLAIN)},
        isolate_recompiles=True,
    )


def _run(way: _Way, settings: QualitySettings, seed: int) -> float:
    """One batch of pictures, from noise."""
    dist.barrier()
    before, begin = interface_counters(), time.monotonic()
    if way.name == EXACT:
        pictures = sample_pictures(way.call, settings.sampling, seed)
    else:
        with cocodiff_compile.denoising(num_steps=settings.steps) as run:
            pictures = sample_pictures(way.call, settings.sampling, seed, run.branch, run.step)
        way.history += run.history
    way.seconds.append(largest(time.monotonic()) + largest(-begin))
    after = interface_counters()
    if before is not None and after is not None:
        way.counted_bytes.append(int(largest((after - before).payload_bytes)))
        way.counted_packets.append(int(largest((after - before).packets)))
    way.pictures[seed] = pictures
    return way.seconds[-1]


def _set_share(way: _Way, settings: QualitySettings, say: Say) -> float | None:
    """Links that make communication the wanted share of exact steps."""
    if not links_are_ours() or settings.share is None:
        return None
    few = QualitySettings(steps=3, batch=settings.batch, dtype=settings.dtype)

    def timed(alone: bool) -> float:
        if not alone:
            return _run(way, few, 0)
        with local_groups():
            return _run(way, few, 0)

    with local_groups() as collectives:
        _run(way, few, 0)
    rate_mbit = set_share(settings.share, timed, _node_megabits(collectives), [])
    say(f"{settings.share} % at {rate_mbit:.0f} Mbit/s")
    return rate_mbit


def _node_megabits(collectives: list[Collective]) -> float:
    """What a node sends to others."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    mine = traffic_between(collectives, dist.get_rank(), lambda rank: rank // per_node)
    return per_node * mine.size_bytes * 8 / 1e6


def _describe(way: _Way, exact: _Way, settings: QualitySettings) -> dict[str, Any]:
    pictures = torch.cat([way.pictures[seed] for seed in settings.seeds])[: settings.pictures]
    truth = torch.cat([exact.pictures[seed] for seed in settings.seeds])[: settings.pictures]
    assert all(torch.equal(other, pictures) for other in gathered(pictures)), "ranks agree"
    kinds = [item.travel for item in way.history]
    return {
        "name": way.name,
        "distances": [item.to_json() for item in distances(pictures, truth)],
        "seconds": way.seconds,
        "counted_bytes": way.counted_bytes,
        "counted_packets": way.counted_packets,
        "sent_bytes": sum(item.sent_bytes for item in way.history),
        "full_bytes": sum(item.full_bytes for item in way.history),
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "memory_bytes": max((item.memory_bytes for item in way.history), default=0),
        "pictures": pictures[:SHOWN],
    }
