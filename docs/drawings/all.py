# SPDX-License-Identifier: Apache-2.0
"""Lists the drawings."""

from __future__ import annotations

from pathlib import Path

from docs.drawings import chunks, tapa, ulysses, v_first, v_major

FOLDER = Path(__file__).parents[1] / "concepts"
DRAWINGS = {
    "ulysses": ulysses.draw,
    "tapa": tapa.draw,
    "v_first": v_first.draw,
    "chunks": chunks.draw,
    "v_major": v_major.draw,
}
