# SPDX-License-Identifier: Apache-2.0
"""Explains on one machine what ranks would share out of a plain model (default: flux, 4 ranks).

    python examples/explain_sharing.py [MODEL] [RANKS] [MIN_GAIN] [FOLDER]

With MIN_GAIN 0 all that can be is shared out, whatever exchanges cost: small models gain nothing.
The tables and a drawing (`sharing.txt`, `sharing.svg`) go to FOLDER with the dumps of all passes.
"""

from __future__ import annotations

import sys

import cocodiff_compile
from cocodiff_compile.lab.small_models import SMALL_MODELS


def main(name: str = "flux", ranks: str = "4", min_gain: str = "0", folder: str = "") -> None:
    small = SMALL_MODELS[name]
    model = small.build(heads=8)
    options = {
        "shard": {"degree": int(ranks), "min_gain": float(min_gain)},
        "debug_dir": folder or None,
    }
    print(cocodiff_compile.explain(model, **small.inputs(model), options=options))


if __name__ == "__main__":
    main(*sys.argv[1:])
