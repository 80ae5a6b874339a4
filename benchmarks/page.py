# SPDX-License-Identifier: Apache-2.0
"""Benchmark of pages: FLUX at its published size, with 57 blocks, over two nodes of eight.

The model exists in shapes only (fake tensors), on a fake group of 16 ranks; times of computing are
those of an H100 by its published figures. Prints how long a page takes to be written, how large it
is, and how long headless Chromium takes to open, zoom and scroll it.

make bench-page
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from cocodiff_compile.compat import FakeTensorMode
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.explain import Explanation
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.cuda import H100
from cocodiff_compile.lab.simulate.public_shapes import find_shape
from cocodiff_compile.ranks.fake_ranks import fake_ranks
from cocodiff_compile.report.collect import collect_reports
from cocodiff_compile.report.tables import format_table
from tests.support.browser import chromium, console_errors, open_page, why_no_browser

NUM_RANKS = 16
RESOLUTION = 1024
REPEATS = 5
OPTIONS = {"shard": "tokens", "topology": "dgx-h100"}

_FRAMES = """
const done = arguments[0], canvas = document.querySelector('canvas.chart'), times = [];
canvas.focus();
let last = performance.now();
function frame(now) {
  times.push(now - last);
  last = now;
  if (times.length > 60) return done(times.slice(1));
  canvas.dispatchEvent(new KeyboardEvent('keydown', {key: times.length < 12 ? '+' : 'ArrowRight',
    shiftKey: times.length >= 12, bubbles: true}));
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
"""
"""Zooms in and moves, one step per frame, and returns the milliseconds of each frame."""


class _ExplainedError(Exception):
    """Ends a compilation whose report is known."""


def explain_flux(layers: int | None, options: Mapping[str, Any] = OPTIONS) -> Explanation:
    """Explains FLUX with at most `layers` blocks of each kind; None: all of them."""
    config = CompileConfig.from_options(options)

    def generate(_gm: GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        raise _ExplainedError

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, config, generate, dry_run=True, device=H100)

    shape = find_shape("flux")
    torch._dynamo.reset()
    with fake_ranks(NUM_RANKS), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = shape.build(layers)
        inputs = shape.inputs(model, RESOLUTION, NUM_RANKS)
        with collect_reports() as reports:
            try:
                torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(**inputs)
            except Exception:
                if not reports:
                    raise
    return Explanation(tuple(reports))


def main(layers: str = "") -> None:
    if reason := why_no_browser():
        sys.exit(reason)
    print("explaining FLUX ...", flush=True)
    begin = time.perf_counter()
    explanation = explain_flux(int(layers) if layers else None)
    explained_s = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flux.html"
        written_s = [_seconds_to_write(explanation, file) for _ in range(REPEATS)]
        opened_s, frames_ms, elements = _in_a_browser(file)
        megabytes = file.stat().st_size / 1e6
    nodes = sum(graph.num_nodes for graph in explanation.graphs)
    print(f"\n{platform.machine()}, torch {torch.__version__}, {REPEATS} runs, medians\n")
    rows = [
        ("attentions", len(explanation.sites)),
        ("nodes of the graph", nodes),
        ("explain, all passes, s", f"{explained_s:.1f}"),
        ("write the page, s", f"{statistics.median(written_s):.2f}"),
        ("size of the page, MB", f"{megabytes:.2f}"),
        ("open it in Chromium, s", f"{statistics.median(opened_s):.2f}"),
        ("elements of the opened page", elements),
        ("zoom or move the timeline, ms per frame", f"{statistics.median(frames_ms):.1f}"),
        ("the same, longest of 60 frames", f"{max(frames_ms):.1f}"),
    ]
    print(format_table(("", "value"), rows))


def _seconds_to_write(explanation: Explanation, file: Path) -> float:
    begin = time.perf_counter()
    explanation.write_page(file)
    return time.perf_counter() - begin


def _in_a_browser(file: Path) -> tuple[list[float], list[float], int]:
    with chromium() as driver:
        opened_s = [open_page(driver, file) for _ in range(REPEATS)]
        frames_ms = driver.execute_async_script(_FRAMES)
        elements = driver.execute_script("return document.querySelectorAll('*').length")
        if errors := console_errors(driver):
            sys.exit(f"the page has errors: {errors}")
    return opened_s, frames_ms, elements


if __name__ == "__main__":
    main(*sys.argv[1:])
