# SPDX-License-Identifier: Apache-2.0
"""Lists what arXiv 2604.14561 reports for Aurora, to print beside what is simulated.

Its speedups are over flat Ulysses at the same number of nodes. V-First and V-Major are part of the
whole method and not of TAPA alone; V-Major is lossy.
"""

from __future__ import annotations

from cocodiff_compile.lab.simulate.variants import AUTO, FLAT, TAPA

# Qwen-Image, batch 1: (nodes, resolution) -> ms per step, share of the all-to-alls.
_QWEN_FLAT = {
    (1, 768): (507, 64),
    (1, 1536): (895, 76),
    (1, 2304): (1089, 81),
    (2, 768): (5859, 95),
    (2, 1536): (9539, 96),
    (2, 2304): (15375, 96),
}
# SD3.5 at 1536: nodes -> TAPA's part of the speedup, speedup of the whole method.
_SD35_AT_1536 = {2: (2.3, 6.9), 4: (2.3, 8.1), 8: (1.9, 3.8)}
_MEAN_TAPA = 2.3
_MEAN_ONE_NODE, _MEAN_MULTI_NODE = 2.5, 5.1
_NODES = (1, 2, 4, 8)


def published_figure(model: str, resolution: int, nodes: int, variant: str) -> str:
    """Returns the published figure nearest to a row of the table, or an empty text."""
    if nodes not in _NODES or model not in ("qwen-image", "flux", "flux2", "sd3.5"):
        return ""
    if variant == FLAT:
        figure = _QWEN_FLAT.get((nodes, resolution)) if model == "qwen-image" else None
        return f"{figure[0]} ms, {figure[1]} %" if figure else ""
    own = _SD35_AT_1536.get(nodes) if (model, resolution) == ("sd3.5", 1536) else None
    if variant == TAPA:
        return f"{own[0]}x TAPA's part" if own else f"{_MEAN_TAPA}x TAPA, mean of all cases"
    if variant == AUTO:
        mean = _MEAN_ONE_NODE if nodes == 1 else _MEAN_MULTI_NODE
        where = "one node" if nodes == 1 else "multi-node"
        return f"{own[1]}x whole method" if own else f"{mean}x whole method, mean {where}"
    return ""
