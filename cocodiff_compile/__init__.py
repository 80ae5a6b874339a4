"""A torch.compile backend for Ulysses-parallel diffusion transformers.

torch.compile(model, backend="cocodiff", options={...})
cocodiff_compile.explain(model, *args)            what the backend finds and does
cocodiff_compile.denoising(pipe)                  tells selective exchange the step
cocodiff_compile.parallel.parallelize(model)      Ulysses for a diffusers transformer
cocodiff_compile.init_distributed()               joins the ranks of torchrun, mpiexec or srun
"""

from cocodiff_compile.compiler.explain import Explanation, explain
from cocodiff_compile.config import CompileConfig
from cocodiff_compile.ir.records import Declined, UlyssesSite
from cocodiff_compile.ranks.launch.init_distributed import init_distributed
from cocodiff_compile.report.collect import collect_reports
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
]
__version__ = "0.1.0"
