"""What collectives send between nodes, counted from graphs."""

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from cocodiff_compile.graph.aten import ALL_GATHER, ALL_TO_ALL, WAIT
from cocodiff_compile.lab.fake_ranks import fake_ranks
from cocodiff_compile.report.traffic import Traffic, collectives_of, traffic_between


def _graph(rows: int, splits: list[int], dtype: torch.dtype) -> Graph:
    world = dist.group.WORLD
    assert world is not None

    def step(value: Tensor) -> Tensor:
        exchanged = WAIT(ALL_TO_ALL(value, splits, splits, world.group_name))
        result: Tensor = WAIT(ALL_GATHER(exchanged, world.size(), world.group_name))
        return result

    return make_fx(step, tracing_mode="fake")(torch.zeros(rows, 5, dtype=dtype)).graph


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_even_exchanges_and_gathers_on_two_nodes_of_three(dtype: torch.dtype, size: int) -> None:
    with fake_ranks(6, rank=4):
        exchange, gather = collectives_of(_graph(12, [2] * 6, dtype))
    assert exchange.ranks == gather.ranks == (0, 1, 2, 3, 4, 5)
    assert exchange.sent_bytes == (2 * 5 * size,) * 6
    assert gather.sent_bytes == (12 * 5 * size,) * 6
    sent = traffic_between([exchange], 4, lambda rank: rank // 3)
    assert sent == Traffic(3 * 2 * 5 * size, 3)


def test_uneven_splits_are_counted_one_by_one() -> None:
    with fake_ranks(3, rank=1):
        exchange, _ = collectives_of(_graph(6, [1, 2, 3], torch.float32))
    assert exchange.sent_bytes == (20, 40, 60)
    assert traffic_between([exchange], 1, lambda rank: rank) == Traffic(80, 2)


def test_on_one_node_nothing_crosses() -> None:
    with fake_ranks(3):
        found = collectives_of(_graph(6, [2, 2, 2], torch.float32))
    assert traffic_between(found, 0, lambda _rank: 0) == Traffic(0, 0)
