"""What would the backend do with a model on 12 ranks? Asked on one machine, without any of them.

    python examples/explain_model.py [MODEL] [RANKS]

A fake process group stands in for the ranks: the graph is captured and every pass runs, no code is
generated and nothing is sent.
"""

from __future__ import annotations

import sys

from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import cocodiff_compile
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.parallel import parallelize


def main(name: str = "flux", num_ranks: str = "12") -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(num_ranks))
    small = SMALL_MODELS[name]
    model = small.build(heads=int(num_ranks))
    inputs = small.inputs(model)
    print(cocodiff_compile.explain(parallelize(model), **inputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
