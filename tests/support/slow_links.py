# SPDX-License-Identifier: Apache-2.0
"""A machine whose links are slow, so that every pass gains."""

from __future__ import annotations

import json
from pathlib import Path


def slow_links(file: Path) -> str:
    """Two nodes whose link makes exchanges take about as long as computation by a guessed CPU."""
    data = {
        "name": "slow",
        "copy_bytes_per_s": 1e10,
        "links": {"wire": {"bytes_per_s": 2e8, "latency_s": 1e-6}},
        "axes": [{"name": "node", "size": 2, "link": "wire"}],
    }
    file.write_text(json.dumps(data))
    return str(file)
