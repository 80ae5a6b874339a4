# SPDX-License-Identifier: Apache-2.0
"""A step without its network, and what it would have sent."""

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from cocodiff_compile.ir.aten import ALL_GATHER, ALL_TO_ALL, WAIT
from cocodiff_compile.lab.bench.local_groups import (
    Collective,
    NodeTraffic,
    local_groups,
    traffic_between,
)
from cocodiff_compile.lab.diffusers_ulysses import enable_ulysses
from cocodiff_compile.lab.local_ranks import run_local_ranks
from cocodiff_compile.lab.small_models import SMALL_MODELS
from cocodiff_compile.ranks.fake_ranks import fake_ranks


def _world_name() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def _exchange(value: Tensor, out_splits: list[int], splits: list[int]) -> Tensor:
    result: Tensor = WAIT(ALL_TO_ALL(value, out_splits, splits, _world_name()))
    return result


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_an_exchange_copies_and_is_counted(dtype: torch.dtype, size: int) -> None:
    value = torch.arange(60, dtype=dtype).reshape(12, 5)
    with fake_ranks(6, rank=4), local_groups() as sent:
        result = _exchange(value, [2] * 6, [2] * 6)
    assert torch.equal(result, value)
    assert result.data_ptr() != value.data_ptr()
    assert sent == [Collective((0, 1, 2, 3, 4, 5), (2 * 5 * size,) * 6)]
    assert traffic_between(sent, 4, lambda rank: rank // 3) == NodeTraffic(3 * 2 * 5 * size, 3)
    assert traffic_between(sent, 4, lambda _rank: 0) == NodeTraffic(0, 0)


def test_uneven_splits_are_counted_one_by_one() -> None:
    with fake_ranks(3, rank=1), local_groups() as sent:
        result = _exchange(torch.ones(6, 5), [2, 2, 3], [1, 2, 3])
    assert result.shape == (7, 5)
    assert torch.equal(result[:6], torch.ones(6, 5))
    assert [item.sent_bytes for item in sent] == [(20, 40, 60)]
    assert traffic_between(sent, 1, lambda rank: rank) == NodeTraffic(80, 2)


def test_a_gather_repeats_what_this_rank_holds() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    with fake_ranks(3), local_groups() as sent:
        result = WAIT(ALL_GATHER(value, 3, _world_name()))
    assert torch.equal(result, torch.cat([value] * 3))
    assert [item.sent_bytes for item in sent] == [(24, 24, 24)]


@pytest.mark.slow
def test_a_compiled_model_runs_without_its_network_and_with_it_again() -> None:
    small = SMALL_MODELS["flux"]
    with fake_ranks(2), torch.no_grad():
        model = small.build(num_layers=1, num_single_layers=2)
        inputs = small.inputs(model)
        enable_ulysses(model)
        compiled = torch.compile(model, backend="cocodiff", fullgraph=True)
        compiled(**inputs)
        found = []
        for call in (model, compiled):
            with local_groups() as sent:
                call(**inputs)
            found.append(list(sent))
            call(**inputs)
            assert len(sent) == 3 * 4 + 1  # three attentions and the gathered result
    assert found[0] == found[1]


def _exchange_around_local_groups(rank: int, _num_ranks: int) -> list[Tensor]:
    value = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    found = [_exchange(value, [1, 1], [1, 1])]
    with pytest.raises(ZeroDivisionError), local_groups():
        found.append(_exchange(value, [1, 1], [1, 1]))
        raise ZeroDivisionError
    found.append(_exchange(value, [1, 1], [1, 1]))
    return found


@pytest.mark.gloo
def test_real_ranks_exchange_again_afterwards_also_after_an_error() -> None:
    results = run_local_ranks(_exchange_around_local_groups, 2, timeout_s=120)
    assert [[item.tolist() for item in found] for found in results] == [
        [[0, 10], [0, 1], [0, 10]],
        [[1, 11], [10, 11], [1, 11]],
    ]
