"""From graphs to kernels: FLOPs, bytes, fusion, collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from cocodiff_compile.devices.device import Device
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.aten import c10d
from cocodiff_compile.lab.simulate.kernels import graph_program
from cocodiff_compile.lab.simulate.program import Compute, Start, Wait
from cocodiff_compile.topology.presets import aurora
from tests.captured import fake_ranks

# One FLOP per second and one byte per second: seconds are counts.
COUNTER = Device("counter", 1.0, 1.0, 1.0, 0.5, 1.0, launch_s=0.0)
FAST_MEMORY = Device("fast memory", 1.0, 1e12, 1.0, 0.5, 1.0, launch_s=0.0)
TOPOLOGY = aurora(12)


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    inputs = [torch.empty(shape) for shape in shapes]
    graph: Graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph


def _kernels(graph: Graph, device: Device = COUNTER) -> list[tuple[str, float]]:
    program = graph_program(graph, device, TOPOLOGY)
    return [(step.kind, step.seconds) for step in program if isinstance(step, Compute)]


def test_a_matmul_takes_its_flops() -> None:
    graph = _graph(torch.mm, (4, 8), (8, 16))
    assert _kernels(graph, FAST_MEMORY) == [("matmul", 2 * 4 * 8 * 16)]


def test_a_thin_matmul_takes_its_bytes() -> None:
    graph = _graph(torch.mm, (1, 64), (64, 64))
    slow_memory = Device("slow memory", 1e12, 1.0, 1.0, 1.0, 1.0, launch_s=0.0)
    assert _kernels(graph, slow_memory) == [("matmul", 4 * (64 + 64 * 64 + 64))]


def test_attention_takes_its_flops_at_its_own_rate() -> None:
    graph = _graph(torch.nn.functional.scaled_dot_product_attention, *[(1, 2, 16, 8)] * 3)
    flops = 2 * 2 * (2 * 16 * 16 * 8)
    assert ("attention", flops / 0.5) in _kernels(graph, FAST_MEMORY)


def test_a_chain_reads_and_writes_once() -> None:
    graph = _graph(lambda x: x.sin().view(8, 8).cos().t().exp(), (64,))
    assert _kernels(graph) == [("memory", 2 * 64 * 4)]


def test_what_is_used_outside_is_written() -> None:
    graph = _graph(lambda x: (y := x.sin(), y.cos()), (64,))
    assert _kernels(graph) == [("memory", 3 * 64 * 4)]


def test_chains_that_do_not_meet_are_kernels_of_their_own() -> None:
    graph = _graph(lambda x, y: (x.sin().cos(), y.cos()), (64,), (32,))
    assert _kernels(graph) == [("memory", 2 * 64 * 4), ("memory", 2 * 32 * 4)]


def test_a_matmul_ends_a_kernel() -> None:
    graph = _graph(lambda x, w: (x.sin() @ w).cos(), (8, 8), (8, 8))
    kinds = [kind for kind, _ in _kernels(graph)]
    assert kinds == ["memory", "matmul", "memory"]


def test_views_are_free_and_a_slice_reads_its_part() -> None:
    assert _kernels(_graph(lambda x: x.view(8, 8).t()[2:], (64,))) == []
    assert _kernels(_graph(lambda x: x[:16].sin(), (64,))) == [("memory", 2 * 16 * 4)]


def test_an_expanded_tensor_is_read_once() -> None:
    graph = _graph(lambda x, y: x + y, (1, 8), (64, 8))
    assert _kernels(graph) == [("memory", 4 * (8 + 2 * 64 * 8))]


def test_no_kernel_is_shorter_than_a_launch() -> None:
    device = Device("launching", 1e12, 1e12, 1.0, 1.0, 1.0, launch_s=1.0)
    assert _kernels(_graph(torch.sin, (2,)), device) == [("memory", 1.0)]


def _exchange(group: str, op: str = "all_to_all") -> Graph:
    def function(x: torch.Tensor) -> torch.Tensor:
        if op == "all_gather":
            moved = c10d.all_gather_into_tensor(x, 12, group)
        elif op == "all_reduce":
            moved = c10d.all_reduce(x, "sum", group)
        else:
            moved = c10d.all_to_all_single(x, [2] * 12, [2] * 12, group)
        return c10d.wait_tensor(c10d.wait_tensor(moved)).sin()

    with fake_ranks(12):
        return _graph(function, (24, 8))


@pytest.mark.parametrize(
    ("group", "axes"), [("0", ("tile", "gpu")), ("tile", ("tile",)), ("gpu", ("gpu",))]
)
def test_a_group_is_named_by_its_axes_or_is_the_whole_one(
    group: str, axes: tuple[str, ...]
) -> None:
    graph = _exchange("0")
    for node in graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default):
        node.args = (*node.args[:-1], group)
    start, wait, kernel = graph_program(graph, COUNTER, TOPOLOGY)
    assert start == Start("all_to_all_single", 0, axes, 24 * 8 * 4)
    assert wait == Wait(0)
    assert isinstance(kernel, Compute)


def test_a_gathering_hands_each_rank_the_whole_part() -> None:
    start, *_ = graph_program(_exchange("0", "all_gather"), COUNTER, TOPOLOGY)
    assert isinstance(start, Start)
    assert (start.size_bytes, start.is_exchange) == (12 * 24 * 8 * 4, False)


def test_a_collective_without_a_cost_is_an_error() -> None:
    with pytest.raises(InvariantError, match="all_reduce"):
        graph_program(_exchange("0", "all_reduce"), COUNTER, TOPOLOGY)
