# SPDX-License-Identifier: Apache-2.0
"""A small machine as a topology file holds it."""

from __future__ import annotations

from typing import Any


def two_node_data() -> dict[str, Any]:
    """Returns two nodes of two tiles."""
    return {
        "name": "two-nodes",
        "copy_bytes_per_s": 1e10,
        "links": {
            "pcie": {"bytes_per_s": 2e10, "latency_s": 5e-6},
            "ethernet": {"bytes_per_s": 1.25e9, "latency_s": 5e-5, "ranks_per_link": 2},
        },
        "axes": [
            {"name": "tile", "size": 2, "link": "pcie"},
            {"name": "node", "size": 2, "link": "ethernet"},
        ],
    }
