# SPDX-License-Identifier: Apache-2.0
"""Tests that programs made from graphs have the compiler's costs of ops and exchanges and its
clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from cocodiff_compile.cost.exchanges import exchange_seconds
from cocodiff_compile.cost.timeline import Span
from cocodiff_compile.devices.device import Device
from cocodiff_compile.devices.xpu import AURORA_TILE
from cocodiff_compile.errors import InvariantError
from cocodiff_compile.ir.aten import c10d
from cocodiff_compile.lab.simulate.program import (
    Program,
    Sent,
    eager_program,
    graph_program,
    joined,
    simulated_costs,
)
from cocodiff_compile.passes.recognize_ulysses import recognize
from cocodiff_compile.schedule.estimate import estimate_schedule
from cocodiff_compile.schedule.graph_tasks import (
    graph_tasks,
    node_order,
    reorder,
    unneeded_seconds,
)
from cocodiff_compile.topology.presets import aurora
from tests.support.captured import capture, fake_ranks
from tests.support.hand_written import WIDTH, Block, fused

# One FLOP per second and one byte per second: seconds are counts.
COUNTER = Device("counter", 1.0, 1.0, 1.0, 0.5, 1.0, launch_s=0.0)
FAST_MEMORY = Device("fast memory", 1.0, 1e12, 1.0, 0.5, 1.0, launch_s=0.0)
SLOW_MEMORY = Device("slow memory", 1e12, 1.0, 1.0, 1.0, 1.0, launch_s=0.0)
LAUNCHING = Device("launching", 1e12, 1e12, 1.0, 1.0, 1.0, launch_s=1.0)
TOPOLOGY = aurora(12)


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    inputs = [torch.empty(shape) for shape in shapes]
    graph: Graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph


def _program(graph: Graph, device: Device = COUNTER, eager: bool = False) -> Program:
    costs = simulated_costs(device, TOPOLOGY, [graph])
    return eager_program(graph, costs) if eager else graph_program(graph, costs)


def _kernels(graph: Graph, device: Device = COUNTER, eager: bool = False) -> list[Any]:
    spans = _program(graph, device, eager).timeline().spans
    return [(span.kind, span.seconds) for span in spans]


def test_a_matmul_takes_its_flops_or_its_bytes() -> None:
    graph = _graph(torch.mm, (4, 8), (8, 16))
    assert _kernels(graph, FAST_MEMORY) == [("matmul", 2 * 4 * 8 * 16)]
    thin = _graph(torch.mm, (1, 64), (64, 64))
    assert _kernels(thin, SLOW_MEMORY) == [("matmul", 4 * (64 + 64 * 64 + 64))]


def test_attention_takes_its_flops_at_its_own_rate() -> None:
    graph = _graph(torch.nn.functional.scaled_dot_product_attention, *[(1, 2, 16, 8)] * 3)
    flops = 2 * 2 * (2 * 16 * 16 * 8)
    assert ("attention", flops / 0.5) in _kernels(graph, FAST_MEMORY)


def test_a_compiled_chain_reads_and_writes_once_and_results_count() -> None:
    chain = _graph(lambda x: x.sin().view(8, 8).cos().t().exp(), (64,))
    assert _kernels(chain) == [("kernel", 2 * 64 * 4)]
    both = _graph(lambda x: (y := x.sin(), y.cos()), (64,))
    assert _kernels(both) == [("kernel", 4 * 64 * 4)]


def test_an_eager_call_is_a_kernel_of_its_own() -> None:
    graph = _graph(lambda x: x.sin().view(8, 8).cos(), (64,))
    assert _kernels(graph, eager=True) == [("kernel", 2 * 64 * 4)] * 2
    assert _kernels(graph, LAUNCHING, eager=True) == [("kernel", 1.0)] * 2
    assert _kernels(_graph(lambda x: x.view(8, 8).t()[2:], (64,)), eager=True) == []


def _exchange(op: str = "all_to_all") -> Graph:
    def function(x: torch.Tensor) -> torch.Tensor:
        if op == "all_gather":
            moved = c10d.all_gather_into_tensor(x, 12, "0")
        elif op == "all_reduce":
            moved = c10d.all_reduce(x, "sum", "0")
        else:
            moved = c10d.all_to_all_single(x, [2] * 12, [2] * 12, "0")
        return c10d.wait_tensor(c10d.wait_tensor(moved)).sin()

    with fake_ranks(12):
        return _graph(function, (24, 8))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("group", "axes"), [("0", ("tile", "gpu")), ("tile", ("tile",)), ("gpu", ("gpu",))]
)
def test_a_collective_alone_takes_what_the_cost_model_says(
    group: str, axes: tuple[str, ...], eager: bool
) -> None:
    graph = _exchange()
    for node in graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default):
        node.args = (*node.args[:-1], group)
    program = _program(graph, eager=eager)
    assert program.sent == (Sent(axes, 24 * 8 * 4, is_all_to_all=True),)
    seconds = exchange_seconds(TOPOLOGY, (axes,), 24 * 8 * 4)
    (exchange,) = _exchanges(program)
    assert exchange.seconds == pytest.approx(seconds)
    assert program.timeline().exposed_s == pytest.approx(seconds)


def _exchanges(program: Program) -> list[Span]:
    return [span for span in program.timeline().spans if span.kind == "exchange"]


def test_a_gathering_hands_each_rank_the_whole_part() -> None:
    (sent,) = _program(_exchange("all_gather")).sent
    assert sent == Sent(("tile", "gpu"), 12 * 24 * 8 * 4, is_all_to_all=False)


def test_a_collective_without_a_cost_is_an_error() -> None:
    with pytest.raises(InvariantError, match="all_reduce"):
        _program(_exchange("all_reduce"))


def test_programs_are_joined_one_after_the_other() -> None:
    program = _program(_exchange())
    once, thrice = program.timeline(), joined([program] * 3).timeline()
    assert thrice.step_s == pytest.approx(3 * once.step_s)
    assert len(thrice.spans) == 3 * len(once.spans)


def test_what_the_compiler_scheduled_takes_as_long_as_it_estimated() -> None:
    """The estimate is of matmuls, attentions and exchanges; what makes results is left out."""
    with fake_ranks(12):
        (gm,) = capture(Block(attend=fused, heads=24), torch.ones(2, 256, WIDTH))
        recognition = recognize(gm.graph)
    costs = simulated_costs(AURORA_TILE, TOPOLOGY, [gm.graph])
    tasks = graph_tasks(gm.graph, recognition, costs)
    estimate = estimate_schedule(tasks.tasks)
    assert estimate.order != tuple(range(len(tasks.tasks)))
    results_s = unneeded_seconds(gm.graph, costs)
    before, after = estimate.before.timeline, estimate.after.timeline
    for expected, order in ((before, None), (after, estimate.order)):
        if order is not None:
            reorder(gm.graph, node_order(gm.graph, tasks.nodes, order))
        simulated = graph_program(gm.graph, costs).timeline()
        assert simulated.step_s == pytest.approx(expected.step_s + results_s, rel=1e-12)
        assert simulated.exposed_s == pytest.approx(expected.exposed_s, rel=1e-12)
        assert simulated.in_flight_s == pytest.approx(expected.in_flight_s, rel=1e-12)
