# SPDX-License-Identifier: Apache-2.0
"""Benchmark of shard-tokens: its time on FLUX at its published size, with 10 to 57 blocks.

The model exists in shapes only (fake tensors), on a fake group of 8 ranks.

make bench-shard
"""

from __future__ import annotations

import copy
import gc
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from cocodiff_compile.compat import FakeTensorMode
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.shard_graph import shard_deciding
from cocodiff_compile.compiler.stages import SHARD, stages
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.ir.collectives import is_collective
from cocodiff_compile.lab.simulate.public_shapes import find_shape
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.pipeline.run_passes import Pipeline
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.tables import format_table

NUM_RANKS = 8
RESOLUTION = 1024
LAYERS = (5, 10, 19, None)
"""The largest number of blocks of each kind; FLUX has 19 double and 38 single ones."""
REPEATS = 3
CONFIG = CompileConfig.from_options({"shard": "tokens", "topology": "dgx-h100"})


class _CapturedError(Exception):
    """Ends a compilation whose graph is known."""


def main() -> None:
    with fake_ranks(NUM_RANKS):
        graphs = [_capture(layers) for layers in LAYERS]
        gc.collect()
        gc.freeze()  # what was captured is not searched again and again while others are timed
        seconds: list[list[float]] = [[] for _ in graphs]
        for _ in range(REPEATS):
            for gm, taken in zip(graphs, seconds, strict=True):
                taken.append(_seconds_to_shard(gm))
    rows = [_row(gm, taken) for gm, taken in zip(graphs, seconds, strict=True)]
    print(f"\n{platform.machine()}, torch {torch.__version__}, {REPEATS} interleaved runs\n")
    headers = ("blocks", "nodes", "min s", "median s", "us per node (min)")
    print(format_table(headers, rows))


def _row(gm: GraphModule, taken: Sequence[float]) -> tuple[Any, ...]:
    blocks, nodes = gm.meta["blocks"], len(gm.graph.nodes)
    return (
        blocks,
        nodes,
        f"{min(taken):.2f}",
        f"{statistics.median(taken):.2f}",
        f"{min(taken) / nodes * 1e6:.0f}",
    )


def _capture(layers: int | None) -> GraphModule:
    shape = find_shape("flux")
    num_blocks = sum(shape.num_layers(layers).values())
    print(f"capturing FLUX with {num_blocks} blocks ...", flush=True)
    torch._dynamo.reset()
    captured: list[GraphModule] = []

    def keep(gm: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        captured.append(gm)
        raise _CapturedError

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, CompileConfig(), keep, dry_run=True)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = shape.build(layers)
        inputs = shape.inputs(model, RESOLUTION, NUM_RANKS)
        try:
            torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(**inputs)
        except Exception:
            if not captured:
                raise
    (gm,) = captured
    gm.meta["blocks"] = num_blocks
    return gm


def _seconds_to_shard(gm: GraphModule) -> float:
    ours = GraphModule(gm, copy.deepcopy(gm.graph))
    begin = time.perf_counter()
    deciding = shard_deciding(ours.graph, CONFIG, dry_run=True)
    Pipeline(stages(SHARD, deciding)).run(ours)
    seconds = time.perf_counter() - begin
    _check(ours.graph, gm.meta["blocks"])
    return seconds


def _check(graph: Graph, num_blocks: int) -> None:
    assert any(map(is_collective, graph.nodes))
    assert len(recognize(graph).sites) == num_blocks


if __name__ == "__main__":
    main()
