# SPDX-License-Identifier: Apache-2.0
"""Benchmark of recognition: its time on SD3 graphs of 12, 24 and 48 layers (fake group of 4 ranks).

make bench-recognize
"""

from __future__ import annotations

import platform
import statistics
import time

import torch
from torch.fx import Graph

import cocodiff_compile
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.tables import format_table

LAYERS = (12, 24, 48)
REPEATS = 9


def main() -> None:
    with fake_ranks(4):
        graphs = {num_layers: _capture(num_layers) for num_layers in LAYERS}
        seconds = _interleaved(graphs)
    base = min(seconds[LAYERS[0]])
    rows = [
        (
            num_layers,
            len(graphs[num_layers].nodes),
            f"{min(taken) * 1e3:.1f}",
            f"{statistics.median(taken) * 1e3:.1f}",
            f"{min(taken) / base:.2f}",
        )
        for num_layers, taken in seconds.items()
    ]
    print(f"\n{platform.machine()}, torch {torch.__version__}, {REPEATS} interleaved runs\n")
    headers = ("layers", "nodes", "min ms", "median ms", f"ratio to {LAYERS[0]} layers (min)")
    print(format_table(headers, rows))


def _interleaved(graphs: dict[int, Graph]) -> dict[int, list[float]]:
    """Seconds of every run, by layers; interleaved, so that a busy machine slows all alike."""
    seconds: dict[int, list[float]] = {num_layers: [] for num_layers in graphs}
    for _ in range(REPEATS):
        for num_layers, graph in graphs.items():
            begin = time.perf_counter()
            assert len(recognize(graph).sites) == num_layers
            seconds[num_layers].append(time.perf_counter() - begin)
    return seconds


def _capture(num_layers: int) -> Graph:
    print(f"capturing SD3 with {num_layers} layers ...", flush=True)
    small = SMALL_MODELS["sd3"]
    model = small.build(num_layers=num_layers)
    inputs = small.inputs(model)
    torch._dynamo.reset()
    explanation = cocodiff_compile.explain(model, options={"shard": {"min_gain": 0}}, **inputs)
    return explanation.sites[0].q.exchange.start.graph


if __name__ == "__main__":
    main()
