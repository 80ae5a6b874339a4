"""Runs the small trained model exactly and with lossy exchanges, interleaved, on live ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.bench.cases import DTYPES
from cocodiff_compile.lab.bench.find_rate import set_share
from cocodiff_compile.lab.bench.links import links_are_ours, sent_while
from cocodiff_compile.lab.bench.local_groups import Collective, local_groups, traffic_between
from cocodiff_compile.lab.diffusers_ulysses import enable_ulysses
from cocodiff_compile.lab.progress import Say
from cocodiff_compile.lab.quality.settings import EXACT, QualitySettings, v_major_of
from cocodiff_compile.lab.quality.small_dit import WEIGHTS, load_small_dit, sample_pictures
from cocodiff_compile.ranks.agreement.all_ranks import gathered, largest
from cocodiff_compile.v_major.denoising import StepRecord

_PLAIN = {"v_first": False, "tapa": "off", "head_chunks": 1, "token_chunks": 1}
"""Options where time is not measured: the exact passes change no value, but compile long."""
_RANGE = 2.0
"""The range of pixel values, which lie in -1..1."""
SHOWN = 6
"""The number of pictures of each variant that are kept for display."""


@dataclass
class _Variant:
    """Holds one variant of the model and its results; lists hold one value per run."""

    name: str
    call: Callable[..., Any]
    pictures: dict[int, Tensor] = field(default_factory=dict)
    """The pictures by seed."""
    seconds: list[float] = field(default_factory=list)
    counted_bytes: list[int] = field(default_factory=list)
    """The bytes that the busiest node's interface sent, without headers."""
    counted_packets: list[int] = field(default_factory=list)
    history: list[StepRecord] = field(default_factory=list)
    """The records of all steps of all runs."""


def measure_quality(settings: QualitySettings, say: Say) -> dict[str, Any]:
    """Returns plain data and pictures, the same on every rank. All ranks must call this."""
    exact = torch.compile(enable_ulysses(_model(settings)), fullgraph=True, dynamic=False)
    variants = [_Variant(EXACT, exact)]
    seconds = _run(variants[0], settings, 0)
    say(f"{EXACT}: Inductor, ready in {seconds:.0f} s")
    rate_mbit = _set_share(variants[0], settings, say) if settings.share else None
    for name in settings.policies:
        variants.append(_Variant(name, _compiled(settings, v_major_of(name))))
        seconds = _run(variants[-1], settings, 0)
        say(f"{name}: ready in {seconds:.0f} s")
    variants = [_Variant(variant.name, variant.call) for variant in variants]  # without results
    for seed in settings.seeds:
        first = seed % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            _run(variant, settings, seed)
        say(f"pictures {settings.batch * (seed + 1)} of {settings.pictures}")
    return {
        "settings": settings.to_json(),
        "ranks": dist.get_world_size(),
        "rate_mbit": rate_mbit,
        "load_average": os.getloadavg()[0],
        "variants": [_describe(variant, variants[0], settings) for variant in variants],
    }


def _model(settings: QualitySettings) -> nn.Module:
    model = load_small_dit(Path(settings.weights) if settings.weights else WEIGHTS)
    return model.to(DTYPES[settings.dtype])


def _compiled(settings: QualitySettings, v_major: dict[str, Any]) -> Callable[..., Any]:
    return torch.compile(  # type: ignore[call-overload,no-any-return]
        _model(settings),
        backend="cocodiff",
        fullgraph=True,
        dynamic=False,
        options={
            "shard": {"min_gain": 0},
            "v_major": v_major,
            **({} if settings.share else _PLAIN),
        },
        isolate_recompiles=True,
    )


def _run(variant: _Variant, settings: QualitySettings, seed: int) -> float:
    """Draws one batch of pictures from noise; returns the seconds taken."""
    dist.barrier()
    if sent := sent_while(lambda: _draw(variant, settings, seed)):
        variant.counted_bytes.append(sent["payload_bytes"])
        variant.counted_packets.append(sent["packets"])
    return variant.seconds[-1]


def _draw(variant: _Variant, settings: QualitySettings, seed: int) -> None:
    begin, sampling = time.monotonic(), settings.sampling
    if variant.name == EXACT:
        pictures = sample_pictures(variant.call, sampling, seed)
    else:
        with cocodiff_compile.denoising(num_steps=settings.steps) as run:
            pictures = sample_pictures(variant.call, sampling, seed, run.branch, run.step)
        variant.history += run.history
    variant.seconds.append(largest(time.monotonic()) + largest(-begin))
    variant.pictures[seed] = pictures


def _set_share(variant: _Variant, settings: QualitySettings, say: Say) -> float | None:
    """Sets the links such that communication takes its share of exact steps; returns the rate."""
    if not links_are_ours() or settings.share is None:
        return None
    few = QualitySettings(steps=3, batch=settings.batch, dtype=settings.dtype)

    def timed(compute_only: bool) -> float:
        with local_groups() if compute_only else nullcontext():
            return _run(variant, few, 0)

    with local_groups() as collectives:
        _run(variant, few, 0)
    rate_mbit = set_share(settings.share, timed, _node_megabits(collectives), [])
    say(f"{settings.share} % at {rate_mbit:.0f} Mbit/s")
    return rate_mbit


def _node_megabits(collectives: list[Collective]) -> float:
    """Returns what a node sends to others."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    mine = traffic_between(collectives, dist.get_rank(), lambda rank: rank // per_node)
    return per_node * mine.size_bytes * 8 / 1e6


def _describe(variant: _Variant, exact: _Variant, settings: QualitySettings) -> dict[str, Any]:
    pictures = torch.cat([variant.pictures[seed] for seed in settings.seeds])[: settings.pictures]
    truth = torch.cat([exact.pictures[seed] for seed in settings.seeds])[: settings.pictures]
    assert all(torch.equal(other, pictures) for other in gathered(pictures)), "ranks agree"
    kinds = [item.payload for item in variant.history]
    return {
        "name": variant.name,
        "distances": [item.to_json() for item in distances(pictures, truth)],
        "seconds": variant.seconds,
        "counted_bytes": variant.counted_bytes,
        "counted_packets": variant.counted_packets,
        "sent_bytes": sum(item.sent_bytes for item in variant.history),
        "full_bytes": sum(item.full_bytes for item in variant.history),
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "cache_bytes": max((item.cache_bytes for item in variant.history), default=0),
        "pictures": pictures[:SHOWN],
    }


@dataclass(frozen=True)
class Distance:
    """Holds the distance of two pictures; PSNR is infinite where they are equal."""

    psnr_db: float
    ssim: float
    mse: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def distances(pictures: Tensor, exact: Tensor) -> list[Distance]:
    """Returns the distance of each picture, [3, side, side] in -1..1."""
    return [_distance(*pair) for pair in zip(pictures, exact, strict=True)]


def _distance(picture: Tensor, exact: Tensor) -> Distance:
    from skimage.metrics import (  # noqa: PLC0415  (optional)
        mean_squared_error,
        peak_signal_noise_ratio,
        structural_similarity,
    )

    ours, theirs = picture.double().numpy(), exact.double().numpy()
    mse = float(mean_squared_error(theirs, ours))
    psnr = float(peak_signal_noise_ratio(theirs, ours, data_range=_RANGE)) if mse else float("inf")
    ssim = structural_similarity(theirs, ours, data_range=_RANGE, channel_axis=0)
    return Distance(psnr, float(ssim), mse)
