# SPDX-License-Identifier: Apache-2.0
"""Implements `cocodiff check`: denoises with a small model, eagerly in one process and compiled on
local gloo ranks, or on those of a launcher, and compares the results.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import cocodiff_compile
from cocodiff_compile.lab.distances import largest_error
from cocodiff_compile.lab.local_ranks import run_local_ranks, tell_parent
from cocodiff_compile.lab.progress import Say, timed_sayer, while_waiting
from cocodiff_compile.lab.small_models import SMALL_MODELS, SmallModel
from cocodiff_compile.ranks.agreement.all_ranks import gathered
from cocodiff_compile.ranks.launch.init_distributed import init_distributed
from cocodiff_compile.ranks.launch.launchers import Launch, find_launch
from cocodiff_compile.report.describe import format_graph
from cocodiff_compile.report.tables import format_bytes, format_table

NUM_NODES = 2
TILES_PER_NODE = 2
LARGEST_DIFFERENCE = 1e-3
"""The allowed difference. Inductor's own difference to eager is up to 5e-4 on these models."""


@dataclass(frozen=True)
class CheckSettings:
    model: str = "flux"
    steps: int = 4
    heads: int = 8
    head_size: int = 32
    image_tokens: int = 192
    text_tokens: int = 24
    debug_dir: str | None = None

    @property
    def small_model(self) -> SmallModel:
        return SMALL_MODELS[self.model]

    def build(self, device: torch.device) -> torch.nn.Module:
        return self.small_model.build(heads=self.heads, head_size=self.head_size).to(device)


@dataclass(frozen=True)
class Denoised:
    """Holds the latents after the last step, and the seconds per step. The first step compiles."""

    latents: torch.Tensor
    step_seconds: list[float]


def run_check(settings: CheckSettings, json_file: Path | None = None) -> int:
    """Runs and prints the check; returns the exit status, 0 if all checks passed."""
    launch = find_launch(os.environ)
    if launch is not None and launch.num_ranks > 1:
        return _run_on_started_ranks(settings, json_file, launch)
    num_ranks = NUM_NODES * TILES_PER_NODE
    say = timed_sayer()
    say(f"{settings.model}: small model, random weights, {settings.steps} steps")
    say("one process, eager")
    model = settings.build(torch.device("cpu"))
    eager = _denoise(settings, model, lambda text: say(f"  {text}"))
    with while_waiting(say) as tell:
        tell(
            f"{num_ranks} gloo ranks ({NUM_NODES} emulated nodes x {TILES_PER_NODE} tiles), the "
            "plain model, shared out by backend 'cocodiff'; the first step compiles"
        )
        ranks = run_local_ranks(
            _local_rank,
            num_ranks,
            settings,
            timeout_s=1200,
            ranks_per_node=TILES_PER_NODE,
            on_message=lambda rank, text: tell(f"  rank 0: {text}") if rank == 0 else None,
        )
    return _put_out(_compare(settings, eager, ranks, NUM_NODES), ranks, json_file)


def _run_on_started_ranks(settings: CheckSettings, json_file: Path | None, launch: Launch) -> int:
    """Runs as one of the launcher's ranks. The first rank also denoises eagerly, and compares."""
    settings = replace(settings, heads=max(settings.heads, launch.num_ranks))
    device = init_distributed()
    say = timed_sayer() if launch.rank == 0 else lambda _text: None
    try:
        say(f"{launch.num_ranks} ranks started by {launch.launcher}, {device.type}")
        ranks = gathered(_compiled_rank(settings, device, say))
        if launch.rank:
            return 0
        say("one process, eager")
        eager = _denoise(settings, settings.build(device), say)
        num_nodes = launch.num_ranks // launch.ranks_here
        return _put_out(_compare(settings, eager, ranks, num_nodes), ranks, json_file)
    finally:
        dist.destroy_process_group()


def _put_out(result: dict[str, Any], ranks: list[dict[str, Any]], json_file: Path | None) -> int:
    print("\n" + format_graph(ranks[0]["graphs"][0]))
    print("\n" + _format_result(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten to {json_file}")
    return 0 if result["ok"] else 1


def _local_rank(_rank: int, _num_ranks: int, settings: CheckSettings) -> dict[str, Any]:
    return _compiled_rank(settings, torch.device("cpu"), tell_parent)


def _compiled_rank(settings: CheckSettings, device: torch.device, say: Say) -> dict[str, Any]:
    model = settings.build(device)
    expected = settings.small_model.num_ulysses_attentions(model)
    options: dict[str, Any] = {"shard": {"min_gain": 0}, "debug_dir": settings.debug_dir}
    compiled: Any = torch.compile(
        model, backend="cocodiff", fullgraph=True, dynamic=False, options=options
    )
    with cocodiff_compile.collect_reports() as reports:
        denoised = _denoise(settings, compiled, say)
    return {
        "denoised": denoised,
        "graphs": [report.summary for report in reports],
        "expected_sites": expected,
    }


def _denoise(settings: CheckSettings, model: torch.nn.Module, say: Say) -> Denoised:
    from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: PLC0415  (slow, and optional)

    small = settings.small_model
    inputs = small.inputs(
        model, image_tokens=settings.image_tokens, text_tokens=settings.text_tokens
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(settings.steps)
    latents = small.latents(inputs)
    seconds = []
    for number, timestep in enumerate(scheduler.timesteps, start=1):
        begin = time.perf_counter()
        with torch.no_grad():
            predicted = small.sample(model(**small.denoise_input(inputs, latents, timestep)))
        torch.get_device_module(latents.device).synchronize()
        seconds.append(time.perf_counter() - begin)
        latents = scheduler.step(predicted, timestep, latents, return_dict=False)[0]
        say(f"step {number}/{settings.steps}, {seconds[-1]:.2f} s")
    return Denoised(latents.cpu(), seconds)


def _compare(
    settings: CheckSettings, eager: Denoised, ranks: list[dict[str, Any]], num_nodes: int
) -> dict[str, Any]:
    graphs, expected = ranks[0]["graphs"], ranks[0]["expected_sites"]
    step_seconds = ranks[0]["denoised"].step_seconds
    sites = [site for graph in graphs for site in graph["sites"]]
    outcomes = [rank["denoised"].latents for rank in ranks]
    difference = largest_error(outcomes, [eager.latents] * len(outcomes))
    agree = all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)
    return {
        "settings": asdict(settings),
        "ranks": len(ranks),
        "nodes": num_nodes,
        "sites": len(sites),
        "expected_sites": expected,
        "declined": sum(len(graph["declined"]) for graph in graphs),
        "graphs": len(graphs),
        "exchanges_per_step": sum(site["num_exchanges"] for site in sites),
        "exchange_bytes_per_step_and_rank": sum(site["bytes"] for site in sites),
        "largest_difference": difference,
        "largest_latent": eager.latents.abs().max().item(),
        "ranks_agree": agree,
        "eager_step_s": min(eager.step_seconds),
        "compiled_first_step_s": step_seconds[0],
        "compiled_step_s": min(step_seconds),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads in the eager process",
        "ok": agree and difference <= LARGEST_DIFFERENCE and len(sites) == expected,
    }


def _format_result(result: dict[str, Any]) -> str:
    ranks = f"{result['ranks']} ranks"
    size = format_bytes(result["exchange_bytes_per_step_and_rank"])
    difference = f"{result['largest_difference']:.1e}"
    difference += f" (latents reach {result['largest_latent']:.1f})"
    rows = [
        ("sites found", f"{result['sites']} of {result['expected_sites']} Ulysses attentions"),
        ("graphs, declined", f"{result['graphs']}, {result['declined']}"),
        ("exchanges per step", result["exchanges_per_step"]),
        ("bytes into exchanges, per step and rank", size),
        (f"largest difference, {ranks} compiled to 1 process eager", difference),
        ("all ranks hold the same latents, bit for bit", "yes" if result["ranks_agree"] else "NO"),
        ("eager step, 1 process", f"{result['eager_step_s']:.3f} s"),
        (f"first compiled step, {ranks}", f"{result['compiled_first_step_s']:.3f} s"),
        (f"compiled step, {ranks}", f"{result['compiled_step_s']:.3f} s"),
        ("verdict", "ok" if result["ok"] else "NOT ok"),
    ]
    return format_table(("what", "value"), rows)
