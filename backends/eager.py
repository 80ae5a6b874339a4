# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(model, backend="cocodiff_eager")`: every pass, no code generation.

For whoever debugs a pass: options, reports, agreement of ranks and process groups are those of
backend "cocodiff"; then the graph that the passes left runs as it stands, op by op. What is wrong
here too is not Inductor's doing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from cocodiff_compile.compat import make_boxed_func
from cocodiff_compile.compiler.compile_graph import compile_for_dynamo


def cocodiff_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compiles one graph for Dynamo. `mode` is checked, and changes nothing."""
    return compile_for_dynamo(gm, example_inputs, options, mode, run_as_it_stands)


def run_as_it_stands(gm: GraphModule, _example_inputs: Sequence[Any], **_options: Any) -> Any:
    """Makes the graph itself callable, in place of Inductor's code."""
    return make_boxed_func(gm.forward)
