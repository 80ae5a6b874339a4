# SPDX-License-Identifier: Apache-2.0
"""Describes the compilation of one captured graph: what was asked for, and how code is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.devices.device import Device

Generate: TypeAlias = "Callable[..., Any]"
"""Makes a graph callable, as Inductor's `compile_fx_inner` does."""


class NeedsNumbersError(Exception):
    """Says that a graph with symbolic sizes is better compiled for each set of sizes."""


@dataclass(frozen=True)
class Compilation:
    """`dry_run`: this rank compiles alone and will not run the graph. Otherwise all ranks compile
    it now: they agree on it, make the process groups it needs, and log what was declined.
    """

    config: CompileConfig
    generate: Generate
    dry_run: bool = False
    device: Device | None = None
    """The rates that ranks compute with; None: they are measured."""
    inductor_settings: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's settings by the mode of torch.compile."""
    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments that Inductor calls the compiler of one graph with."""
    for_any_size: bool = False
    """Whether tokens are to be shared out in a graph with symbolic sizes; NeedsNumbersError is
    raised if that graph allows less than one with numbers may.
    """
