# SPDX-License-Identifier: Apache-2.0
"""`cocodiff explain SCRIPT.py`: scripts run dry, as one rank of many that are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import distributed as dist

from cocodiff_compile.cli import main

SCRIPT = """
import os
import sys

import torch
from torch import nn
from torch import distributed as dist

import cocodiff_compile


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2))


JOIN
model = nn.Sequential(Attention(), Attention()).eval()
options = {"shard": {"min_gain": 0}}
compiled = torch.compile(model, backend="cocodiff", dynamic=False, options=options)
with torch.no_grad():
    for tokens in (16, 16, 32):
        result = compiled(torch.randn(1, tokens, 64))
        assert result.shape == (1, tokens, 64) and not result.any()
print("ranks", dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"], *sys.argv[1:])
END
"""
JOINS = ("cocodiff_compile.init_distributed()", 'dist.init_process_group("gloo")')


def _script(folder: Path, join: str = JOINS[0], end: str = "dist.destroy_process_group()") -> str:
    script = folder / "serve.py"
    script.write_text(SCRIPT.replace("JOIN", join).replace("END", end))
    return str(script)


@pytest.mark.parametrize("join", JOINS)
def test_a_script_runs_dry_whoever_joins(
    join: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    given = ["--ranks", "4", "--ranks-per-node", "2", "--out", str(tmp_path / "out")]
    assert main(["explain", *given, _script(tmp_path, join), "--prompt", "a cat"]) == 0
    printed = capsys.readouterr().out
    assert "ranks 4 2 --prompt a cat" in printed
    assert "2 graphs, 4 Ulysses attentions" in printed, "a graph for each number of tokens"
    assert (tmp_path / "out" / "index.html").stat().st_size > 1000
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_what_a_failing_script_compiled_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script(tmp_path, end='raise RuntimeError("no scheduler")')
    assert main(["explain", "--out", str(tmp_path / "out"), script]) == 1
    printed = capsys.readouterr().out
    assert "2 graphs, 4 Ulysses attentions" in printed
    assert "serve.py failed" in printed and "no scheduler" in printed
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--ranks", "1", "x.py"], "at least 2 ranks"),
        (["--ranks", "4", "--ranks-per-node", "3", "x.py"], "divides them"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    assert words in capsys.readouterr().err
