# SPDX-License-Identifier: Apache-2.0
"""A torch.compile backend that shares diffusion transformers out over many devices.

torch.compile(model, backend="cocodiff", options={"shard": "tokens"})
cocodiff_compile.explain(model, *args)            what the backend finds and does
cocodiff_compile.denoising(pipe)                  tells V-Major which denoising step it is in
cocodiff_compile.init_distributed()               joins the ranks of torchrun, mpiexec or srun
cocodiff_compile.register_attention(op, ...)      makes an op of yours known as an attention
cocodiff_compile.save_decisions(reports, path)    keeps what was decided for the next start
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cocodiff_compile.compiler.explain import Explanation, explain
    from cocodiff_compile.config import CompileConfig
    from cocodiff_compile.ir.attention_ops import register_attention, unregister_attention
    from cocodiff_compile.ir.records import Declined, UlyssesSite
    from cocodiff_compile.ranks.launch.init_distributed import init_distributed
    from cocodiff_compile.report.collect import collect_reports, save_decisions
    from cocodiff_compile.v_major.denoising import Denoising, denoising

__all__ = [
    "CompileConfig",
    "Declined",
    "Denoising",
    "Explanation",
    "UlyssesSite",
    "collect_reports",
    "denoising",
    "explain",
    "init_distributed",
    "register_attention",
    "save_decisions",
    "unregister_attention",
]
__version__ = "0.1.0"

_HOMES = {
    "CompileConfig": "config",
    "Declined": "ir.records",
    "Denoising": "v_major.denoising",
    "Explanation": "compiler.explain",
    "UlyssesSite": "ir.records",
    "collect_reports": "report.collect",
    "denoising": "v_major.denoising",
    "explain": "compiler.explain",
    "init_distributed": "ranks.launch.init_distributed",
    "register_attention": "ir.attention_ops",
    "save_decisions": "report.collect",
    "unregister_attention": "ir.attention_ops",
}
"""The module of each public name. Modules are imported when a name is first used: Inductor takes
longer to import than torch itself.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
