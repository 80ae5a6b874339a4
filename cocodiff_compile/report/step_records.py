# SPDX-License-Identifier: Apache-2.0
"""Turns what a rank recorded of denoising steps into plain data, for its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cocodiff_compile.v_major.denoising import StepRecord


def describe_steps(
    steps: Sequence[StepRecord],
    layers: Sequence[str],
    sent_by_layer: Mapping[str, Sequence[int]],
    full_by_layer: Sequence[int],
) -> dict[str, Any]:
    """Returns all steps of one compiled graph. `sent_by_layer` holds for each kind of step the
    bytes that each attention sends to others in a call, `full_by_layer` those of a call
    uncompressed.
    """
    return {
        "layers": list(layers),
        "full_by_layer": list(full_by_layer),
        "sent_by_layer": {kind: list(sizes) for kind, sizes in sent_by_layer.items()},
        "steps": [
            {
                "step": record.step,
                "kinds": dict(record.kinds),
                "sent_bytes": record.sent_bytes,
                "full_bytes": record.full_bytes,
                "cache_bytes": record.cache_bytes,
                "losses": list(record.losses),
            }
            for record in steps
        ],
    }
