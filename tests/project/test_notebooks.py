# SPDX-License-Identifier: Apache-2.0
"""Notebooks are committed without outputs, and run from their first cell to their last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_output_is_committed(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_explain_and_simulate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of its own runs all cells, as a reader's does."""
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", python_path)
    path = ROOT / "examples" / "explain_and_simulate.ipynb"
    book = nbformat.read(path, as_version=4)
    settings = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=settings).execute()
    texts, pictures = _outputs(book)
    assert "shared out, over 12 ranks: " in texts
    assert "single_transformer_blocks.0-1.attn" in texts
    assert "57 blocks from 3 graphs" in texts
    assert "simulated step" in texts
    assert pictures == ["image/png", "image/svg+xml", "image/svg+xml", "image/png"]


def _outputs(book: Any) -> tuple[str, list[str]]:
    """Returns what was printed, and the kinds of the pictures in their order."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    texts = "".join(output.get("text", "") for output in outputs)
    kinds = [kind for output in outputs for kind in output.get("data", ()) if "image" in kind]
    return texts, kinds
