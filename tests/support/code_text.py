# SPDX-License-Identifier: Apache-2.0
"""The text of the code that Inductor writes, without building or running it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import torch
from torch._inductor.graph import GraphLowering


class _WrittenError(Exception):
    """Ends a compile once its text is written."""


@contextmanager
def text_only() -> Iterator[list[str]]:
    """Collects the text of what is compiled in the block, which ends with the first compile: call
    the compiled function last.
    """
    written: list[str] = []

    def keep(code: str) -> None:
        written.append(code)
        raise _WrittenError

    with (
        patch.object(GraphLowering, "save_output_code", keep),
        torch._inductor.config.patch(fx_graph_cache=False),
        suppress(_WrittenError, torch._dynamo.exc.BackendCompilerFailed),
    ):
        yield written
