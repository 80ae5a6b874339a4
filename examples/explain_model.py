# SPDX-License-Identifier: Apache-2.0
"""Explains on one machine what the backend would do with a model on several ranks (default: 12).

    python examples/explain_model.py [MODEL] [RANKS] [FILE]

A fake process group stands in for the ranks: the graph is captured and every pass runs, no code is
generated and nothing is sent. The estimated step is drawn to FILE (.svg, .png, or .json for
Perfetto).
"""

from __future__ import annotations

import sys

import cocodiff_compile
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.fake_ranks import fake_ranks


def main(name: str = "flux", num_ranks: str = "12", file: str = "") -> None:
    small = SMALL_MODELS[name]
    model = small.build(heads=int(num_ranks))
    inputs = small.inputs(model)
    with fake_ranks(int(num_ranks)):
        options = {"shard": {"min_gain": 0}}  # whatever that gains: the model is small
        explanation = cocodiff_compile.explain(model, options=options, **inputs)
        print(explanation)
    if file:
        explanation.draw(file)
        print(f"written: {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])
