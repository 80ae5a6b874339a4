# SPDX-License-Identifier: Apache-2.0
"""shard-tokens: what is gathered is what the node was, whoever reads it, in memory too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cocodiff_compile.decide.shared_nodes import choose_sharing
from cocodiff_compile.ir.aten import ALL_GATHER, value_of
from cocodiff_compile.ir.records import Recognition
from cocodiff_compile.lab.coverage.examine import COSTS, examine, sharded_copy
from cocodiff_compile.lab.lockstep import run_lockstep
from cocodiff_compile.passes.shard_tokens import KEPT_SHARES, ShardTokens
from tests.support.captured import capture_call, fake_ranks
from tests.support.lockstep import machine, machine_groups
from tests.support.plain_dits import WIDTH, Block

TOKENS = 22
"""They do not divide: with padding, gathered rows do not lie as those of the node anyway."""
RANKS = 4


class _Read(nn.Module):
    """A block whose result is read as a whole."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block, self.read = Block(), read

    def forward(self, x: Tensor) -> Any:
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
    "written by strides": lambda x: x.transpose(1, 2).as_strided_scatter(
        torch.ones(4, 4), *STRIDED
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


DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2]
"""Which gloo does not carry."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_a_backend_may_not_carry_are_gathered_as_bytes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = _Read(lambda x: (x.abs() * 100).to(dtype)).eval()
    x = torch.randn(2, TOKENS, WIDTH)
    with fake_ranks(RANKS):
        gm, values = capture_call(model, x)
        ours, _ = sharded_copy(gm, RANKS)
    gathers = ours.graph.find_nodes(op="call_function", target=ALL_GATHER)
    assert [value_of(node).dtype for node in gathers] == [torch.uint8]
    given = [[*values, torch.tensor([rank])] for rank in range(RANKS)]
    expected = model(x)
    for (actual,) in run_lockstep(ours.graph, given, machine_groups("0", machine(RANKS))):
        assert actual.dtype is dtype
        difference = actual.double() - expected.double()
        assert float(difference.abs().max()) <= float(expected.double().abs().max()) / 8


def test_shares_of_such_numbers_do_not_leave_their_graph() -> None:
    model = _Read(lambda x: (x, (x * 100).to(torch.int16))).eval()
    with fake_ranks(RANKS):
        gm, _ = capture_call(model, torch.randn(2, TOKENS, WIDTH))
        sharing = choose_sharing(gm.graph, "0", RANKS, COSTS, keeps_shares=True)
        ShardTokens(sharing.steps, "0", keeps_shares=True).run(gm.graph, Recognition())
    gm.graph.lint()
    output = gm.graph.output_node()
    assert [*output.meta[KEPT_SHARES]] == [0]
    assert [value_of(node).shape[1] for node in output.all_input_nodes] == [6, TOKENS]


def _parts(first: slice, second: slice) -> Callable[[Tensor], Any]:
    return lambda x: (x[:, first], x[:, second])


TOGETHER: dict[str, Callable[[Tensor], Any]] = {
    "a part": lambda x: (x, x[:, 5:]),
    "a part of a part": lambda x: (x, x[:, 5:][:, 2:]),
    "transposed": lambda x: (x, x.mT),
    "rows": lambda x: (x, x.view(2, -1)),
    "parts that overlap": _parts(slice(6), slice(4, None)),
    "parts of a view": lambda x: (x.mT[:, :3], x.mT[:, 2:]),
    "another dim": lambda x: (x[:, :3], x[..., 3:]),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("keeps_shares", [False, True])
def test_results_that_show_the_same_memory_go_on_to_do_so(name: str, keeps_shares: bool) -> None:
    """A caller that writes to one of them sees it in the other."""
    torch.manual_seed(0)
    model, x = _Read(TOGETHER[name]).eval(), torch.randn(2, TOKENS, WIDTH)
    with fake_ranks(RANKS), torch.no_grad():
        gm, values = capture_call(model, x)
        sharing = choose_sharing(gm.graph, "0", RANKS, COSTS, keeps_shares)
        ShardTokens(sharing.steps, "0", keeps_shares).run(gm.graph, Recognition())
        written, shown = model(x)
    written += 100
    assert sharing.steps
    given = [[*values, torch.tensor([rank])] for rank in range(RANKS)]
    for ours, theirs in run_lockstep(gm.graph, given, machine_groups("0", machine(RANKS))):
        ours.add_(100)
        torch.testing.assert_close(theirs, shown, rtol=0, atol=1e-4)


@pytest.mark.parametrize("parts", [_parts(slice(5), slice(5, None)), lambda x: x.split([5, 17], 1)])
def test_parts_that_lie_apart_leave_their_graph_as_shares(parts: Callable[[Tensor], Any]) -> None:
    with fake_ranks(RANKS):
        gm, _ = capture_call(_Read(parts).eval(), torch.randn(2, TOKENS, WIDTH))
        sharing = choose_sharing(gm.graph, "0", RANKS, COSTS, keeps_shares=True)
        ShardTokens(sharing.steps, "0", keeps_shares=True).run(gm.graph, Recognition())
    assert [*gm.graph.output_node().meta[KEPT_SHARES]] == [0, 1]
