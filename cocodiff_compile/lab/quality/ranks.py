# SPDX-License-Identifier: Apache-2.0
"""Runs the small trained model exactly and with lossy exchanges, interleaved, on live ranks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.compat import name_cpp_kernels
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.cost.timeline import Timeline
from cocodiff_compile.errors import UserError
from cocodiff_compile.lab.bench.cases import DTYPES
from cocodiff_compile.lab.bench.find_rate import set_share
from cocodiff_compile.lab.bench.links import links_are_ours, sent_while, set_rate
from cocodiff_compile.lab.bench.local_groups import Collective, local_groups, traffic_between
from cocodiff_compile.lab.bench.profile import ProfiledStep, profile_step
from cocodiff_compile.lab.diffusers_ulysses import enable_ulysses
from cocodiff_compile.lab.progress import Say
from cocodiff_compile.lab.quality.settings import EXACT, PASSES, QualitySettings, v_major_of
from cocodiff_compile.lab.quality.small_dit import (
    WEIGHTS,
    Sampling,
    load_small_dit,
    sample_pictures,
)
from cocodiff_compile.ranks.agreement.all_ranks import gathered, largest
from cocodiff_compile.v_major.denoising import StepRecord

_UNCUT = {"head_chunks": 1, "token_chunks": 1}
_PLAIN = {"v_first": False, "tapa": "off", **_UNCUT}
"""Options where time is not measured: the exact passes change no value, but compile long."""
_RANGE = 2.0
"""The range of pixel values, which lie in -1..1."""
_PROFILED_STEPS = 2


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

    @property
    def is_lossy(self) -> bool:
        return self.name not in (EXACT, PASSES)


def measure_quality(settings: QualitySettings, say: Say) -> dict[str, Any]:
    """Returns plain data and pictures, the same on every rank. All ranks must call this."""
    if settings.is_profiled:
        name_cpp_kernels()
    variants = [_Variant(EXACT, _stock(settings))]
    _make_ready(variants[0], settings, "stock Inductor", say)
    rate_mbit = _set_links(variants[0], settings, say)
    for name in settings.policies:
        variants.append(_Variant(name, _compiled(settings, name)))
        _make_ready(variants[-1], settings, "cocodiff", say)
    variants = [_Variant(variant.name, variant.call) for variant in variants]  # without results
    for seed in settings.seeds:
        first = seed % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            _run(variant, settings, seed)
        say(f"pictures {settings.batch * (seed + 1)} of {settings.pictures}")
    steps = [_profiled(variant, settings) for variant in variants if settings.is_profiled]
    return {
        "settings": settings.to_json(),
        "ranks": dist.get_world_size(),
        "rate_mbit": rate_mbit,
        "load_average": os.getloadavg()[0],
        "variants": [_describe(variant, variants[0], settings) for variant in variants],
        "profiled_steps": [item for of_ranks in gathered(steps) for item in of_ranks],
    }


def _make_ready(variant: _Variant, settings: QualitySettings, backend: str, say: Say) -> None:
    """Compiles a variant by drawing with it, and keeps what was decided."""
    say(f"{variant.name}: {backend} compiles")
    with cocodiff_compile.collect_reports() as reports:
        seconds = _run(variant, replace(settings, steps=settings.ready_steps or settings.steps), 0)
    file = _decisions_file(settings, variant.name)
    if file is not None and reports and dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        cocodiff_compile.save_decisions(reports, file)
    say(f"{variant.name}: ready in {seconds:.0f} s")


def _decisions_file(settings: QualitySettings, name: str) -> Path | None:
    """Returns where decisions about one variant are kept, if they are."""
    if not settings.decisions:
        return None
    links = f"{settings.rate_mbit:g}_mbit" if settings.rate_mbit else "loopback"
    return Path(settings.decisions) / f"{name}_batch_{settings.batch}_{links}.json"


def _with_decisions(options: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Adds what an earlier run decided, if that holds for these options and versions."""
    if file is None or not file.exists():
        return options
    given = {**options, "decision": str(file)}
    try:
        config = CompileConfig.from_options(given)
        assert config.decision is not None
        config.decision.refuse_other(config.made_with(False))
    except UserError:
        return options
    return given


def _model(settings: QualitySettings) -> nn.Module:
    model = load_small_dit(Path(settings.weights) if settings.weights else WEIGHTS)
    return model.to(DTYPES[settings.dtype])


def _stock(settings: QualitySettings) -> Callable[..., Any]:
    return torch.compile(enable_ulysses(_model(settings)), fullgraph=True, dynamic=False)


def _compiled(settings: QualitySettings, name: str) -> Callable[..., Any]:
    options = {
        "shard": {"min_gain": 0},
        "v_major": v_major_of(name),
        "debug_dir": str(Path(settings.debug_dir) / name) if settings.debug_dir else None,
        **({} if name == PASSES else _plain(settings)),
    }
    return torch.compile(  # type: ignore[call-overload,no-any-return]
        _model(settings),
        backend="cocodiff",
        fullgraph=True,
        dynamic=False,
        options=_with_decisions(options, _decisions_file(settings, name)),
        isolate_recompiles=True,
    )


def _plain(settings: QualitySettings) -> dict[str, Any]:
    """Returns the options of lossy variants that save compiling."""
    if not settings.is_timed:
        return _PLAIN
    return {} if settings.chunks else _UNCUT


def _run(variant: _Variant, settings: QualitySettings, seed: int) -> float:
    """Draws one batch of pictures from noise; returns the seconds taken."""
    dist.barrier()
    if sent := sent_while(lambda: _draw(variant, settings, seed)):
        variant.counted_bytes.append(sent["payload_bytes"])
        variant.counted_packets.append(sent["packets"])
    return variant.seconds[-1]


def _draw(variant: _Variant, settings: QualitySettings, seed: int) -> None:
    begin = time.monotonic()
    pictures = _sampled(variant, variant.call, settings.sampling, seed)
    variant.seconds.append(largest(time.monotonic()) + largest(-begin))
    variant.pictures[seed] = pictures


def _sampled(variant: _Variant, call: Callable[..., Any], sampling: Sampling, seed: int) -> Tensor:
    if not variant.is_lossy:
        return sample_pictures(call, sampling, seed)
    with cocodiff_compile.denoising(num_steps=sampling.steps) as run:
        pictures = sample_pictures(call, sampling, seed, run.branch, run.step)
    variant.history += run.history
    return pictures


def _profiled(variant: _Variant, settings: QualitySettings) -> dict[str, Any]:
    """Returns the last of the model's calls in a few steps, as the profiler sees it."""
    calls = itertools.count(1)
    sampling = replace(settings.sampling, steps=_PROFILED_STEPS)
    last = _PROFILED_STEPS * (1 if sampling.guidance == 1 else 2)
    timelines: list[Timeline] = []

    def call(**inputs: Any) -> Any:
        if next(calls) < last - 1:  # the profiler's own first time is no call's
            return variant.call(**inputs)
        results: list[Any] = []
        timelines.append(profile_step(dist.barrier, lambda: results.append(variant.call(**inputs))))
        return results[0]

    _sampled(variant, call, sampling, 0)
    return ProfiledStep(variant.name, dist.get_rank(), timelines[-1]).to_json()


def _set_links(variant: _Variant, settings: QualitySettings, say: Say) -> float | None:
    """Sets the links to their rate, or such that communication takes its share of exact steps;
    returns the rate.
    """
    if not links_are_ours() or not settings.is_timed:
        return None
    if settings.share is None:
        set_rate(settings.rate_mbit)
        say(f"links set to {settings.rate_mbit:g} Mbit/s")
        return settings.rate_mbit
    few = QualitySettings(steps=3, batch=settings.batch, dtype=settings.dtype)

    def timed(compute_only: bool) -> float:
        with local_groups() if compute_only else nullcontext():
            return _run(variant, few, 0)

    with local_groups() as collectives:
        _run(variant, few, 0)
    megabits = _node_megabits(collectives)
    rate_mbit = set_share(settings.share, timed, megabits, [])
    say(f"links set to {rate_mbit:.0f} Mbit/s: exchanges take about {settings.share} % of a step")
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
        "pictures": pictures,
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
