# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the compiler itself: time and memory of a cold compile, Inductor alone and ours.

    make bench-own-cost

FLUX blocks, half of them double-stream, on a fake group of two nodes whose links are slow enough
for every pass to have something to do. Every compile runs in a process of its own with empty
caches, so each figure is that of a first start; the two backends take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.slow_links import slow_links
from cocodiff_compile.lab.diffusers_ulysses import enable_ulysses
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.collect import collect_reports
from cocodiff_compile.report.tables import format_table

LAYERS = (2, 8, 24)
BACKENDS = ("inductor", "cocodiff")
NUM_RANKS = 2


@dataclass(frozen=True)
class Cost:
    backend: str
    layers: int
    compile_s: float
    peak_mib: float
    """Peak memory of the process, Python and torch included."""
    num_nodes: int = 0
    pass_ms: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "LAYERS"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        print(json.dumps(asdict(measure(parsed.one[0], int(parsed.one[1])))))
        return
    costs = [_apart(backend, layers) for layers in parsed.layers for backend in BACKENDS]
    if parsed.json:
        parsed.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1))
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print(_table(costs))
    for cost in costs[1::2]:
        print(f"{cost.layers} layers: {'; '.join(cost.notes)}")


def _apart(backend: str, layers: int) -> Cost:
    """Measured in a process of its own, with empty caches."""
    print(f"{layers} layers, {backend} ...", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.own_cost", "--one", backend, str(layers)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def measure(backend: str, layers: int) -> Cost:
    """A cold compile of the whole model in this process."""
    small = SMALL_MODELS["flux"]
    with (
        slow_links(NUM_RANKS) as topology,
        fake_ranks(NUM_RANKS),
        torch.no_grad(),
        collect_reports() as reports,
    ):
        model = small.build(num_layers=layers // 2, heads=8, head_size=32)
        inputs = small.inputs(model, image_tokens=256, text_tokens=32)
        options: dict[str, Any] = {"topology": topology, "shard": {"min_gain": 0}}
        if backend == "inductor":
            model, options = enable_ulysses(model), {}
        compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
        begin = time.perf_counter()
        compiled(**inputs)
        seconds = time.perf_counter() - begin
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not reports:
        return Cost(backend, layers, seconds, peak_mib)
    (report,) = reports
    passes = {item["pass"]: item["ms"] for item in report.summary["passes"]}
    notes = tuple(note for item in report.summary["passes"] for note in item["notes"])
    return Cost(backend, layers, seconds, peak_mib, report.num_nodes, passes, notes)


def _table(costs: list[Cost]) -> str:
    rows = []
    for stock, ours in zip(costs[::2], costs[1::2], strict=True):
        passes_ms = sum(ours.pass_ms.values())
        rows.append(
            (
                ours.layers,
                ours.num_nodes,
                f"{stock.compile_s:.1f}",
                f"{ours.compile_s:.1f}",
                f"{ours.compile_s / stock.compile_s:.2f}",
                ", ".join(f"{name} {ms:.0f}" for name, ms in ours.pass_ms.items()),
                f"{passes_ms / max(1, ours.num_nodes) * 1e3:.1f}",
                f"{stock.peak_mib:.0f}",
                f"{ours.peak_mib:.0f}",
            )
        )
    headers = (
        "layers",
        "graph nodes",
        "Inductor s",
        "cocodiff s",
        "ratio",
        "passes ms",
        "us per node",
        "Inductor MiB",
        "cocodiff MiB",
    )
    return format_table(headers, rows)


if __name__ == "__main__":
    main()
