"""shard-tokens: what is gathered is what the node was, also to a reader that looks at its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cocodiff_compile.lab.coverage.examine import examine
from tests.support.plain_dits import WIDTH, Block

TOKENS = 22
"""They do not divide: with padding, gathered rows do not lie as those of the node anyway."""
RANKS = 4


class _Read(nn.Module):
    """A block whose result is read as a whole."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.read = Block(), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.block(x))


@torch.library.custom_op("tests::diagonals", mutates_args=())
def _diagonals(x: Tensor) -> Tensor:
    """Reads memory by strides of its own, as a kernel may."""
    return x.as_strided((4, 4), (1, WIDTH + 1)).clone()


@_diagonals.register_fake
def _shape_of_diagonals(x: Tensor) -> Tensor:
    return x.new_empty(4, 4)


@torch.library.custom_op("tests::double_rows", mutates_args=("x",))
def _double_rows(x: Tensor) -> None:
    x.mul_(2)


def _write_rows(x: Tensor) -> Tensor:
    x = x.transpose(1, 2).clone(memory_format=torch.preserve_format)
    torch.ops.tests.double_rows(x[:, :, 2:5])
    return x.as_strided((4, 4), (7, WIDTH))


STRIDED = (4, 4), (1, WIDTH)

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view of permuted dims": lambda x: (
        x.unflatten(-1, (4, 8)).permute(2, 3, 0, 1).reshape(4, 8, -1, 4)
    ),
    "strides of permuted dims": lambda x: x.permute(2, 0, 1).as_strided(*STRIDED),
    "strides of some rows": lambda x: x[:, 3:].as_strided(*STRIDED),
    "rows before those": lambda x: x[:, 3:].as_strided(*STRIDED, 0),
    "strides of a copy": lambda x: x.transpose(1, 2).contiguous()[1].as_strided(*STRIDED),
    "strides of a sum": lambda x: (x.permute(2, 0, 1) + 1).as_strided(*STRIDED),
    "strides of what is repeated": lambda x: x.expand(3, *x.shape).as_strided(*STRIDED),
    "written by strides": lambda x: (
        x.transpose(1, 2).as_strided_scatter(torch.ones(4, 4), *STRIDED)
    ),
    "an op nobody knows": lambda x: torch.ops.tests.diagonals(x.permute(1, 0, 2)[2:]),
    "an op that writes": _write_rows,
}


@pytest.mark.parametrize("name", READS)
def test_a_reader_of_memory_sees_the_memory_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, TOKENS, WIDTH)}
    found = examine(name, _Read(READS[name]).eval(), inputs, RANKS)
    assert not found.reason
    assert found.modes == {"Ulysses": 1}
    assert found.error < 1e-5
