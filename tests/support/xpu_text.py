# SPDX-License-Identifier: Apache-2.0
"""Prints the text that Inductor writes for an XPU, as JSON, with the order of the graph.

    python -m tests.support.xpu_text TOPOLOGY

Text only: there is neither an XPU nor triton. An interface stands in for the driver, whoever asks
for triton is told that it is there, and nothing goes on once the text is written. All of that stays
in the process, which therefore does nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import (
    XpuInterface,
    get_interface_for_device,
    register_interface_for_device,
)
from torch._inductor import scheduler
from torch.fx import GraphModule
from torch.utils import _triton

from cocodiff_compile.compat import FakeTensorMode, compile_fx_inner
from cocodiff_compile.compiler.compile_graph import compile_graph
from cocodiff_compile.compiler.generated_order import graph_kinds
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.cpu import CPU
from tests.support.absent_devices import load_stand_in
from tests.support.captured import fake_ranks
from tests.support.code_text import text_only
from tests.support.hand_written import WIDTH, Block

_PROPERTIES = SimpleNamespace(name="nothing", multi_processor_count=64, gpu_subslice_count=64)


class NoXpu(XpuInterface):
    """An XPU that is not there, of which Inductor can ask how large it is."""

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    get_device_properties = staticmethod(lambda _device=None: _PROPERTIES)
    get_compute_capability = staticmethod(lambda _device=None: {})
    raise_if_triton_unavailable = staticmethod(lambda _device=None: None)


def write_text(topology: str) -> dict[str, Any]:
    """Returns the code of a hand-written Ulysses attention on two ranks, and its graph's order."""
    found: dict[str, Any] = {}

    def keep(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        found["kinds"] = graph_kinds(gm.graph)
        return compile_fx_inner(gm, *args, **kwargs)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, config, keep, dry_run=True, device=CPU.guess)

    config = CompileConfig.from_options({"topology": topology, "head_chunks": 2})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device("xpu:0"):
        model, x = Block().eval(), torch.ones(1, 64, WIDTH)
    with (
        mode,
        patch.object(scheduler, "has_triton", lambda: True),
        patch.object(_triton, "triton_hash_with_backend", lambda: "text only"),
        torch.no_grad(),
        text_only() as written,
    ):
        torch.compile(model, backend=backend, fullgraph=True)(x)
    return {**found, "code": written[0]}


if __name__ == "__main__":
    load_stand_in("xpu")
    get_interface_for_device("cpu")  # registers torch's own, which would overwrite ours later
    for name in ("xpu", "xpu:0"):
        register_interface_for_device(name, NoXpu)
    with fake_ranks(2):
        json.dump(write_text(sys.argv[1]), sys.stdout)
