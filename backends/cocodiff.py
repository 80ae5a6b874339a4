# SPDX-License-Identifier: Apache-2.0
"""The entry point of `torch.compile(model, backend="cocodiff")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from cocodiff_compile.compat import compile_fx_inner
from cocodiff_compile.compiler.code_folder import ensure_code_folder
from cocodiff_compile.compiler.compile_graph import compile_for_dynamo


def cocodiff(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compiles one graph for Dynamo. `mode` means what it means to Inductor."""
    return compile_for_dynamo(gm, example_inputs, options, mode, _compile_into_folder)


def _compile_into_folder(*args: Any, **inductor_options: Any) -> Any:
    ensure_code_folder()
    return compile_fx_inner(*args, **inductor_options)
