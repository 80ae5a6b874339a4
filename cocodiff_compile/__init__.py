"""A torch.compile backend for Ulysses-parallel diffusion transformers.

torch.compile(model, backend="cocodiff", options={...})
cocodiff_compile.explain(model, *args)            what the backend finds and does
cocodiff_compile.parallel.parallelize(model)      Ulysses for a diffusers transformer
"""

from cocodiff_compile.config import CompileConfig
from cocodiff_compile.explain import Explanation, explain
from cocodiff_compile.graph.records import Declined, UlyssesSite
from cocodiff_compile.report.collect import collect_reports

__all__ = [
    "CompileConfig",
    "Declined",
    "Explanation",
    "UlyssesSite",
    "collect_reports",
    "explain",
]
__version__ = "0.1.0"
