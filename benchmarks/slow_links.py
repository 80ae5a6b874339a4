# SPDX-License-Identifier: Apache-2.0
"""Links on which exchanges take about as long as the computation of a guessed CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def slow_links(num_ranks: int) -> Iterator[str]:
    """Yields the path of a topology file of so many nodes, for every pass to have work."""
    links = {
        "name": "slow",
        "copy_bytes_per_s": 1e10,
        "links": {"wire": {"bytes_per_s": 1e8, "latency_s": 1e-5}},
        "axes": [{"name": "node", "size": num_ranks, "link": "wire"}],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(links, file)
        file.flush()
        yield file.name
