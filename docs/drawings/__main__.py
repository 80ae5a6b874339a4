# SPDX-License-Identifier: Apache-2.0
"""Writes the drawings of docs/concepts: `python -m docs.drawings`."""

from __future__ import annotations

from docs.drawings.all import DRAWINGS, FOLDER

for name, draw in DRAWINGS.items():
    (FOLDER / f"{name}.svg").write_text(draw())
