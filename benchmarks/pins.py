# SPDX-License-Identifier: Apache-2.0
"""Benchmark of what it costs to hold Inductor to the order of a graph, and of what is lost without.

    make bench-pins

A node that is pinned follows another one that its data do not need (`pin_order.py`), and Inductor
fuses less around it. Every model is compiled with each way of pinning on a fake group of two ranks
in this process, where a step is computation alone; the steps of all ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor.utils import fresh_cache
from torch.fx import Graph, GraphModule, Node

from benchmarks.slow_links import slow_links
from cocodiff_compile.compat import compile_fx_inner
from cocodiff_compile.compiler import pin_order
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.generated_order import graph_kinds, keeps_order
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.ir.collectives import is_wait
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.tables import format_table
from cocodiff_compile.schedule.graph_tasks import is_anchor

MODELS = ("flux", "wan")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNKS: Mapping[str, Mapping[str, int]] = {
    "whole": {"head_chunks": 1, "token_chunks": 1},
    "2 head chunks": {"head_chunks": 2, "token_chunks": 1},
    "2 token chunks": {"head_chunks": 1, "token_chunks": 2},
}
STEPS = 30
NUM_RANKS = 2
Pins = Callable[[Graph], Iterator[tuple[Node, Sequence[Node]]]]


def no_pins(_graph: Graph) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Leaves the order to Inductor."""
    return iter(())


def pin_every_anchor(graph: Graph) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Holds every matmul, attention, exchange and wait behind the one before it."""
    last: Node | None = None
    for node in filter(is_anchor, graph.nodes):
        if last is not None:
            yield node, (last,)
        if not is_wait(node):
            last = node


WAYS: dict[str, Pins] = {
    "round exchanges": pin_order.pins,
    "every anchor": pin_every_anchor,
    "none": no_pins,
}


@dataclass
class Compiled:
    """One model compiled with one way of pinning."""

    call: Callable[[], Any]
    kernels: int
    keeps_order: bool | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument("--chunks", nargs="+", choices=CHUNKS, default=tuple(CHUNKS))
    parser.add_argument("--json", type=Path, help="write all figures there")
    parsed = parser.parse_args()
    rows = []
    with fake_ranks(NUM_RANKS), torch.no_grad():
        for name in parsed.models:
            for dtype in parsed.dtypes:
                for chunks in parsed.chunks:
                    print(f"{name}, {dtype}, {chunks} ...", flush=True)
                    rows += measure(name, dtype, chunks)
    if parsed.json:
        parsed.json.write_text(json.dumps(rows, indent=1))
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    headers = ("model", "dtype", "cut", "pins", "kernels", "keeps the order", "step ms", "to none")
    print(format_table(headers, rows))


def measure(name: str, dtype: str, chunks: str) -> list[tuple[Any, ...]]:
    """Returns a row for each way of pinning."""
    made = {
        way: compile_with(pins, name, DTYPES[dtype], CHUNKS[chunks]) for way, pins in WAYS.items()
    }
    times: dict[str, list[float]] = {way: [] for way in made}
    for _ in range(STEPS):
        for way, compiled in made.items():
            begin = time.perf_counter()
            compiled.call()
            times[way].append(time.perf_counter() - begin)
    median = {way: statistics.median(seconds) for way, seconds in times.items()}
    return [
        (
            name,
            dtype,
            chunks,
            way,
            compiled.kernels,
            {True: "yes", False: "no", None: "not shown"}[compiled.keeps_order],
            f"{median[way] * 1e3:.2f}",
            f"{median[way] / median['none']:.3f}",
        )
        for way, compiled in made.items()
    ]


def compile_with(pins: Pins, name: str, dtype: torch.dtype, chunks: Mapping[str, int]) -> Compiled:
    """Compiles a small model of two blocks of each kind, with every pass."""
    small = SMALL_MODELS[name]
    codes: list[tuple[str, list[str]]] = []

    def generate(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        kinds = graph_kinds(gm.graph)
        compiled = compile_fx_inner(gm, *args, **kwargs)
        codes.append((compiled.source_code, kinds))
        return compiled

    torch._dynamo.reset()
    torch.manual_seed(0)
    with slow_links(NUM_RANKS) as topology, fresh_cache():
        config = CompileConfig.from_options(
            {"topology": topology, "shard": {"min_gain": 0}, **chunks}
        )
        model = small.build(num_layers=2, heads=8, head_size=32).to(dtype)
        inputs = small.inputs(model, image_tokens=512, text_tokens=64)

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            return compile_graph(gm, example_inputs, config, generate)

        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with mock.patch.object(pin_order, "pins", pins):
            compiled(**inputs)
    ((code, kinds),) = codes
    return Compiled(lambda: compiled(**inputs), count_kernels(code), keeps_order(code, kinds))


def count_kernels(code: str) -> int:
    """Returns how many kernels the wrapper calls that Inductor generated."""
    body = code[code.index("def call(") :]
    return len(re.findall(r"^\s*(?:cpp_fused|triton)\w*\(", body, re.MULTILINE))


if __name__ == "__main__":
    main()
